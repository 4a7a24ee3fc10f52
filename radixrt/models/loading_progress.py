"""Logs the progress of loading the weights of a large checkpoint."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds from the start to the first line, and at least between two lines. A smaller checkpoint gets none."""

Tensor = TypeVar("Tensor")


class LoadingProgress:
    """Counts loaded bytes and files. Its lines are plain text, because they go through the log of a child process."""

    def __init__(
        self,
        files: Sequence[Path],
        level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            files: of the checkpoint's weights.
            level: of the log's lines.
            clock: a monotonic time in seconds.
        """
        self._num_files = len(files)
        self._total_bytes = sum(file.stat().st_size for file in files)
        self._loaded_files = 0
        self._loaded_bytes = 0
        self._lines = _Lines(level, clock)

    def add_tensor(self, num_bytes: int) -> None:
        """Count a loaded tensor, and log a line if one is due."""
        self._loaded_bytes += num_bytes
        files = f"{self._loaded_files} of {self._num_files} files, " if self._num_files > 1 else ""
        self._lines.show(
            f"{files}{self._loaded_bytes / 1e9:.1f} of {self._total_bytes / 1e9:.1f} GB"
        )

    def add_file(self) -> None:
        """Count a file of which all tensors are loaded."""
        self._loaded_files += 1


def counted(
    tensors: Iterator[Tensor],
    total: int,
    level: int = logging.INFO,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tensor]:
    """Yield the tensors, and log the number of those that were used, out of ``total``."""
    lines = _Lines(level, clock)
    for number, tensor in enumerate(tensors, 1):
        yield tensor
        lines.show(f"{number} of {total} tensors")


class _Lines:
    """Logs a line if enough time has passed since the one before."""

    def __init__(self, level: int, clock: Callable[[], float]) -> None:
        self._level = level
        self._clock = clock
        self._next_line = clock() + INTERVAL

    def show(self, progress: str) -> None:
        now = self._clock()
        if now >= self._next_line:
            self._next_line = now + INTERVAL
            log.log(self._level, "Loading weights: %s.", progress)
