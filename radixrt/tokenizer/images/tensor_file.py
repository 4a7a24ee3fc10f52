"""The tensor of a large image in a file, which the workers map.

In a message, its bytes would be copied a dozen times on their way through the scheduler, and in
every loop that they pass the tokens of running answers would wait: the tensor of the largest image
that Qwen's processor makes has 300 MB.
"""

import itertools
import logging
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

MAX_SENT_BYTES = 4 << 20
"""Larger tensors are put into files."""


class TensorFile:
    """A file that lives as long as this object; each reader gets a name of its own for it."""

    def __init__(self, path: Path, values: NDArray[np.float32]) -> None:
        """
        Raises:
            OSError: the disk is full.
        """
        self._path = path
        weakref.finalize(self, path.unlink, missing_ok=True)
        values.tofile(path)
        self.values = np.memmap(path, values.dtype, "r", shape=values.shape)
        """The tensor, mapped."""
        self._numbers = itertools.count()

    def link(self) -> str:
        """A further name of the file, which its reader removes.

        Raises:
            OSError: the file system has no further names.
        """
        name = f"{self._path}.{next(self._numbers)}"
        os.link(self._path, name)
        return name


def put_into_file(folder: Path, values: NDArray[np.float32]) -> TensorFile | None:
    """A tensor in a new file of a folder; None: it is small, or the file can't be written."""
    if values.nbytes <= MAX_SENT_BYTES:
        return None
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="image-")
        os.close(descriptor)
        return TensorFile(Path(name), values)
    except OSError as error:
        log.warning("An image is sent and not put into a file of %s: %s.", folder, error)
        return None
