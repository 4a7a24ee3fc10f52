"""Reads the header of a GGUF file: metadata and the table of tensors.

The reader of the package ``gguf`` makes an array of each element of an array: 34 s for the 262,144
tokens of Gemma 3, against less than a second here. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.models.gguf.form import PART, TensorEntry
from radixrt.models.refusals import damaged, unknown_kind

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
"""Formats of ``struct``, which are also numpy's, by type number."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_VERSIONS = (2, 3)


class GGUFFile(NamedTuple):
    """The header of a GGUF file, or of all files of a model that was split."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: list[Path]


def read_header(path: Path) -> GGUFFile:
    """Read the header of a model, given its file or the first of its files.

    Raises:
        ConfigError: no GGUF file that can be read, or files are missing.
    """
    files = _all_files(path)
    headers = [_read_one(file) for file in files]
    split = headers[0].metadata.get("split.count", 0)
    if split > 1 and split != len(files):
        raise ConfigError(
            f"{path} is one of {split} files of a model; keep their names (NAME-00001-of-{split:05}.gguf), or "
            "join them with `llama-gguf-split --merge`."
        )
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    return GGUFFile(headers[0].metadata, tensors, files)


def _all_files(path: Path) -> list[Path]:
    """All files of the model, by the naming of ``llama-gguf-split``."""
    part = PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    files = [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{path.parent} lacks {len(missing)} of the {count} files of {stem}: {missing[0]}. Download it too."
        )
    return files


def _read_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, path).read()
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(damaged(path, "GGUF", error)) from error


class _Header:
    """A position in a GGUF file, which moves on with each value read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def read(self) -> GGUFFile:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._scalar("I")) not in _VERSIONS:
            raise ValueError(f"version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
            infos.append((name, self._scalar("I"), shape, self._scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        tensors, known = {}, set(GGMLQuantizationType)
        for name, kind, shape, offset in infos:
            if kind not in known:
                raise ConfigError(f"{self._path} cannot be served. {unknown_kind(kind)}")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if not shape or shape[-1] % block:
                raise ValueError(f"{name} has rows that are no whole blocks: {list(shape)}")
            row_bytes = shape[-1] // block * size
            if start + offset + math.prod(shape[:-1]) * row_bytes > len(self._data):
                raise ValueError(f"it ends before the data of {name}")
            at = start + offset
            tensors[name] = TensorEntry(name, kind, shape, str(self._path), at, row_bytes)
        return GGUFFile(metadata, tensors, [self._path])

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError(f"it ends at byte {len(self._data)}, within its header")
        self._at += count
        return self._data[self._at - count : self._at]

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))
        return value

    def _string(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value = self._scalar(_SCALARS[kind])
            # the shortest decimal number: the one that config.json had
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return [self._value(kind) for _ in range(count)]


_BY_LAYER = {"gemma4", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
"""Architectures whose sizes may differ by layer."""


class Metadata:
    """The metadata of one architecture, whose keys begin with its name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture: str = file.metadata.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return default if value is None else value

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ConfigError(
                f"{self.file.files[0]} has no {self.architecture}.{key} in its metadata."
            )
        if isinstance(value, list) and self.architecture not in _BY_LAYER:
            raise ConfigError(f"Layers of different shapes ({self.architecture}.{key}) are not supported.")  # fmt: skip
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def in_layers(self, part: str) -> list[bool]:
        """Whether each layer has a tensor of this name."""
        return [self.has(f"blk.{i}.{part}") for i in range(self.need("block_count"))]
