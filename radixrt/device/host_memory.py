"""The memory of this machine that is free."""

from pathlib import Path


def available_memory() -> int:
    """Bytes that could be had without swapping: MemAvailable and the cgroup's limit, whichever is
    less."""
    available = 4 << 30  # where the system does not tell
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line
        )
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
