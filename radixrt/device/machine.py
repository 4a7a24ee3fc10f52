"""Memory, processors and NUMA nodes of this machine, within the limits of the control groups that
this process is in, as Linux reports them in ``/sys`` and ``/proc``.

Tests have a folder of their own as ``root``, in which these are.
"""

import contextlib
import ctypes
import logging
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

OTHER_BYTES = 512 << 20
"""Bytes that the processes, the activations and a small KV cache take beside the weights."""

CPU_POOL_SHARE = 0.5
"""Share of the available memory that the KV pool takes by default on a CPU, where other programs
need memory too."""
CPU_POOL_LIMIT = 8 << 30
"""The same in bytes. A larger pool must be asked for."""
MIN_KEPT_STATES = 32
"""States of recurrent layers that are kept beside a pool in any case."""
MIN_STATE_ROWS = 8
"""Sequences with such states that may run at a time."""

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Bytes: version 1 writes a limit that is none as some 2 ** 63."""


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that could be had without swapping: the kernel's estimate, or less by a limit of a
    control group.

    Args:
        root: in which ``proc`` and ``sys`` are; tests have one of their own.
    """
    available = 4 << 30  # where the system does not say
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line
        )
        available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_free_in_groups(root)]))


def has_gpu() -> bool:
    """Whether this machine has a driver of a GPU (dxg: that of WSL), asked without torch."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd"))


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes that are left in each control group above this process that has a limit, of version 1
    and 2.

    Files in the page cache count as free: the kernel drops them before it ends a process.
    """
    for folder in control_groups("memory", root):
        v2 = folder / "memory.max", folder / "memory.current", "inactive_file", "active_file"
        v1 = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", "total_inactive_file", "total_active_file"  # fmt: skip
        for limit_file, used_file, *droppable in (v2, v1):
            limit = _number(limit_file)
            used = _number(used_file)
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            stat = folder / "memory.stat"
            yield min(limit, limit - used + sum(_statistic(stat, name) for name in droppable))


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """The folders of this process's groups of a controller (``memory`` or ``cpu``) and of all
    groups above them."""
    mount = root / "sys/fs/cgroup"
    yield mount  # in a container, the namespace's own group
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        if controllers:
            yield top
        parts = Path(path.lstrip("/")).parts
        for end in range(1, len(parts) + 1):
            yield top.joinpath(*parts[:end])


def _number(file: Path) -> int | None:
    """The number in a file; None: the file or the number is not there (``max``)."""
    text = _text(file)
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    lines = _text(file).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


log = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call."""
_PREFERRED, _INTERLEAVE = 1, 3
"""Policies of set_mempolicy(2)."""


class Place(NamedTuple):
    """Where a worker computes, and where its memory is."""

    cpus: frozenset[int]
    nodes: tuple[int, ...]


def usable_cpus() -> frozenset[int]:
    """The logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(cpus: Collection[int], root: Path = _ROOT) -> int:
    """The number of physical cores of logical processors."""
    folder = root / "sys/devices/system/cpu"
    return len({_text(folder / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus})


def numa_nodes(cpus: Collection[int], root: Path = _ROOT) -> dict[int, frozenset[int]]:
    """The CPUs of ``cpus`` in each NUMA node that has some; one node where the system names none."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if own := parse_cpus(_text(folder / "cpulist")) & frozenset(cpus):
            nodes[int(folder.name[4:])] = own
    return dict(sorted(nodes.items())) or {0: frozenset(cpus)}


def place_of(index: int, count: int, nodes: Mapping[int, frozenset[int]]) -> Place:
    """The place of worker ``index`` of ``count``: a node, or a part of one, or several nodes.

    >>> nodes = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    >>> place_of(1, 2, nodes)
    Place(cpus=frozenset({2, 3}), nodes=(1,))
    >>> place_of(1, 4, nodes)
    Place(cpus=frozenset({1}), nodes=(0,))
    >>> place_of(0, 1, nodes).nodes
    (0, 1)
    """
    numbers = sorted(nodes)
    if count <= len(numbers):
        first, end = (len(numbers) * i // count for i in (index, index + 1))
        taken = tuple(numbers[first:end])
        return Place(frozenset().union(*(nodes[node] for node in taken)), taken)
    number = numbers[len(numbers) * index // count]
    inside = [i for i in range(count) if numbers[len(numbers) * i // count] == number]
    cpus, part = sorted(nodes[number]), inside.index(index)
    first, end = (len(cpus) * i // len(inside) for i in (part, part + 1))
    return Place(frozenset(cpus[first:end] or cpus), (number,))


def bind(place: Place) -> None:
    """Let this thread, and those that it starts, compute on the processors of a place, and take
    memory of its nodes first. Memory that has been written stays where it is."""
    if sys.platform != "linux":
        log.warning("--numa has no effect on %s.", sys.platform)
        return
    os.sched_setaffinity(0, place.cpus)
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        log.warning("--numa places no memory on %s; its threads are bound.", platform.machine())
        return
    words = (ctypes.c_ulong * (max(place.nodes) // 64 + 1))()
    for node in place.nodes:
        words[node // 64] |= 1 << node % 64
    policy = _PREFERRED if len(place.nodes) == 1 else _INTERLEAVE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call, policy, words, ctypes.c_ulong(64 * len(words) + 1)):
        reason = os.strerror(ctypes.get_errno())
        log.warning("Memory cannot be placed on the NUMA nodes %s: %s.", list(place.nodes), reason)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The processors whose time the control groups above this process allow; None: no limit."""
    quotas = []
    for folder in control_groups("cpu", root):
        texts = _text(folder / "cpu.max").split() or [
            _text(folder / "cpu.cfs_quota_us"),
            _text(folder / "cpu.cfs_period_us"),
        ]
        with contextlib.suppress(ValueError, IndexError, ZeroDivisionError):
            quotas.append(int(texts[0]) / int(texts[1]))  # "max" is no number
    return min((quota for quota in quotas if quota > 0), default=None)


def huge_pages(root: Path = _ROOT) -> str:
    """When processes get pages of 2 MiB: ``always``, ``madvise`` or ``never``; "" if unknown."""
    return _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))


def shared_huge_pages(root: Path = _ROOT) -> str:
    """When shared memory has pages of 2 MiB: ``always``, ``within_size``, ``advise``, ``never``,
    ``deny`` or ``force``; "" if unknown."""
    return _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))


def _chosen(text: str) -> str:
    """
    >>> _chosen("always [madvise] never")
    'madvise'
    """
    return text.partition("[")[2].partition("]")[0]


def busy_ticks(cpus: Collection[int], root: Path = _ROOT) -> int | None:
    """Hundredths of a second for which processors have worked since the start of the machine, the
    time that a hypervisor took included; None if unknown."""
    fields = (line.split() for line in _text(root / "proc/stat").splitlines())
    found = {line[0]: list(map(int, line[1:9])) for line in fields if line[0].startswith("cpu")}
    own = [found[f"cpu{cpu}"] for cpu in cpus if f"cpu{cpu}" in found]
    return sum(sum(times) - times[3] - times[4] for times in own) if own else None


def parse_cpus(text: str) -> frozenset[int]:
    """
    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    parts = (part.split("-") for part in text.split(",") if part)
    return frozenset(cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
