"""The tensor of a large image in a file, which the workers map.

In a message, its bytes would be copied a dozen times on their way through the scheduler, and in
every loop that they pass the tokens of running answers would wait: the tensor of the largest image
that Qwen's processor makes has 300 MB.
"""

import itertools
import os
import uuid
import weakref
from pathlib import Path

MAX_SENT_BYTES = 4 << 20
"""Larger tensors are put into files."""


class TensorFile:
    """A file that lives as long as this object; each reader gets a name of its own for it. Whoever
    prepares the image writes it.

    Args:
        folder: for the file, which has a new name there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"image-{uuid.uuid4().hex}"
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        self._numbers = itertools.count()

    def link(self) -> str:
        """A further name of the file, which its reader removes.

        Raises:
            OSError: the file system has no further names.
        """
        name = f"{self.path}.{next(self._numbers)}"
        os.link(self.path, name)
        return name
