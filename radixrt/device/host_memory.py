"""The memory of this machine that is available, within the limits of the control groups that this
process is in."""

from collections.abc import Iterator
from pathlib import Path

OTHER_BYTES = 512 << 20
"""Bytes that the processes, the activations and a small KV cache take beside the weights."""

CPU_POOL_SHARE = 0.5
"""Share of the available memory that the KV pool takes by default on a CPU, where other programs
need memory too."""
CPU_POOL_LIMIT = 8 << 30
"""The same in bytes. A larger pool must be asked for."""

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
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
