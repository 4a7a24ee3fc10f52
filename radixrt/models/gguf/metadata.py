"""The metadata of a GGUF file, by the names that llama.cpp gives them."""

from typing import Any

from radixrt.base.errors import ConfigError
from radixrt.models.gguf.file import GGUFFile

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
