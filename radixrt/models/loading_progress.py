"""Logs the progress of loading the weights of a large checkpoint."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds from the start to the first line, and at least between two lines. A smaller checkpoint
gets none."""


class LoadingProgress:
    """Counts loaded bytes and files. Its lines are plain text, because they go through the log of a
    child process."""

    def __init__(
        self,
        files: Sequence[Path],
        level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_files = len(files)
        self._total_bytes = sum(file.stat().st_size for file in files)
        self._loaded_files = 0
        self._loaded_bytes = 0
        self._level = level
        self._clock = clock
        self._next_line = clock() + INTERVAL

    def add_tensor(self, num_bytes: int) -> None:
        """Count a loaded tensor, and log a line if one is due."""
        self._loaded_bytes += num_bytes
        now = self._clock()
        if now < self._next_line:
            return
        self._next_line = now + INTERVAL
        files = f"{self._loaded_files} of {self._num_files} files, " if self._num_files > 1 else ""
        log.log(
            self._level,
            "Loading weights: %s%.1f of %.1f GB.",
            files,
            self._loaded_bytes / 1e9,
            self._total_bytes / 1e9,
        )

    def add_file(self) -> None:
        """Count a file of which all tensors are loaded."""
        self._loaded_files += 1
