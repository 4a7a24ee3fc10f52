"""Names, kinds and tensors of GGUF files, for modules that read none: numpy is not imported here,
so the supervisor starts sooner."""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from radixrt.base.errors import ConfigError

PLAIN_KINDS = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Kinds of tensors that are not quantized, as PyTorch calls them."""
PROCESSOR_FILE = "preprocessor_config.json"
"""File of a checkpoint folder with the settings of the image processor."""
TABLE = "gguf.json"
"""File of a checkpoint folder that lists the tensors of its GGUF file."""
TOWER_PREFIXES = ("v.", "mm.", "a.")
"""The names of tensors of towers, for images and sound, and of their projectors begin with these."""
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""End of the name of each file of a model that was split: its number, from 1, and the number of
files."""


class TensorEntry(NamedTuple):
    """The place of one tensor."""

    name: str
    kind: int
    """``gguf.GGMLQuantizationType``."""
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    file: str
    offset: int
    """Bytes from the beginning of the file."""
    row_bytes: int
    """Bytes of a row, the last dimension."""


def is_of_tower(entry: TensorEntry) -> bool:
    """Whether a tensor belongs to a tower, of images or sound, or to its projector."""
    return entry.name.startswith(TOWER_PREFIXES)


def import_gguf(name: Path | str) -> None:
    """Check that the package ``gguf`` is there, which GGUF files need.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{name} is a GGUF file, for which the package gguf is needed: pip install gguf."
        )
