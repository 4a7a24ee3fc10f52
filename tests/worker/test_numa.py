"""Processors and memory of workers on machines with several NUMA nodes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixrt.base.config import ServerConfig
from radixrt.device import machine
from radixrt.device.machine import (
    busy_ticks,
    cpu_quota,
    huge_pages,
    num_cores,
    numa_nodes,
    place_of,
)
from radixrt.supervisor.launch import prepare
from radixrt.supervisor.supervisor import Supervisor

CPUS = frozenset(range(16))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes of four cores, each core with two threads, as Linux numbers them; node 2 has memory
    alone."""
    files = {"node0": "0-3,8-11", "node1": "4-7,12-15", "node2": ""}
    for node, cpus in files.items():
        write(tmp_path / "sys/devices/system/node", **{f"{node}__cpulist": cpus})
    for cpu in range(16):
        siblings = f"{cpu % 8},{cpu % 8 + 8}"
        name = f"cpu{cpu}__topology__thread_siblings_list"
        write(tmp_path / "sys/devices/system/cpu", **{name: siblings})
    return tmp_path


def test_nodes_cores_and_limits_are_read(root: Path) -> None:
    nodes = numa_nodes(CPUS, root)
    assert nodes == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert numa_nodes({4, 12}, root) == {1: {4, 12}}  # the others are not this process's
    assert num_cores(CPUS, root) == 8 and num_cores({0, 8, 1}, root) == 2
    assert cpu_quota(root) is None and huge_pages(root) == ""
    write(root, **{"sys__kernel__mm__transparent_hugepage__enabled": "always [madvise] never"})
    assert huge_pages(root) == "madvise"


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_quota_of_the_groups_above_counts(root: Path, version: int) -> None:
    if version == 2:
        write(root / "proc/self", cgroup="0::/a/b")
        write(root / "sys/fs/cgroup/a", **{"cpu.max": "150000 100000"})
        write(root / "sys/fs/cgroup/a/b", **{"cpu.max": "max 100000"})
    else:
        write(root / "proc/self", cgroup="4:cpu,cpuacct:/a\n2:memory:/")
        for folder, quota in (("cpu", "-1"), ("cpu/a", "150000")):
            names = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}
            write(root / "sys/fs/cgroup" / folder, **names)
    assert cpu_quota(root) == 1.5


def test_the_work_of_processors_counts_their_idle_time_not(root: Path) -> None:
    write(
        root,
        proc__stat="cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 4 800 16 32 64 128 0 0\ncpu1 1 0 0 9 9 0 0 0 0 0",
    )
    assert busy_ticks({0}, root) == 1 + 2 + 4 + 32 + 64 + 128
    assert busy_ticks({0, 1}, root) == 232


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16])
def test_workers_share_all_processors_and_none_twice(root: Path, count: int) -> None:
    nodes = numa_nodes(CPUS, root)
    places = [place_of(index, count, nodes) for index in range(count)]
    assert sorted(cpu for place in places for cpu in place.cpus) == sorted(CPUS)
    for place in places:
        assert place.cpus <= frozenset().union(*(nodes[node] for node in place.nodes))
    assert all(len(place.nodes) == 1 for place in places) or count == 1


SHOW_POLICY = """
import ctypes, os
from radixrt.device.machine import Place, bind, usable_cpus
cpu = min(usable_cpus())
bind(Place(frozenset({cpu}), (0,)))
mode = ctypes.c_int(-1)
assert ctypes.CDLL(None).syscall(239, ctypes.byref(mode), None, 0, None, 0) == 0
print(os.sched_getaffinity(0) == {cpu}, mode.value)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="get_mempolicy has another number")
def test_a_bound_process_prefers_the_memory_of_its_node() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_POLICY], capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(machine._PREFERRED)], done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_replicas_of_a_server_compute_on_processors_of_their_own() -> None:
    config = prepare(ServerConfig(dp=2, numa=True, kernel_threads=1, max_total_tokens=1024))
    with Supervisor(config) as supervisor:
        pids, all_cpus, deadline = supervisor.pids, os.sched_getaffinity(0), time.monotonic() + 60
        cpus = [all_cpus]
        while any(own == all_cpus for own in cpus) and time.monotonic() < deadline:
            time.sleep(0.1)
            cpus = [os.sched_getaffinity(pids[f"worker.{n}"]) for n in range(2)]
        assert not cpus[0] & cpus[1] and cpus[0] | cpus[1] == all_cpus
        assert os.sched_getaffinity(pids["scheduler.0"]) == all_cpus
