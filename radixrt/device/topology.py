"""Processors, NUMA nodes and limits of this machine, as Linux reports them in ``/sys`` and
``/proc``.

Tests have a folder of their own as ``root``.
"""

import contextlib
import ctypes
import logging
import os
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from radixrt.device.host_memory import control_groups

log = logging.getLogger(__name__)

_ROOT = Path("/")
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
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
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
