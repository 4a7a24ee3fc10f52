"""Fingerprint of the model that an engine computes: engines of one server must have the same."""

import hashlib
from pathlib import Path

from radixrt.base.config import ServerConfig

SAMPLES = 64
SAMPLE_BYTES = 4096
"""Of each weight file, so many pieces are read: all of it would take minutes, and fine-tuned models
differ everywhere."""


def model_fingerprint(config: ServerConfig) -> str:
    """Hash of a checkpoint's config, of samples of its weights and of the settings that change what
    is computed: 32 hex digits.

    Args:
        config: its ``model_path`` is a folder.
    """
    hashed = hashlib.blake2b(digest_size=16)
    random_seed = config.random_seed if config.load_format == "dummy" else None
    settings = (config.dtype, config.quantization, config.kv_cache_dtype, random_seed)
    hashed.update(repr(settings).encode())
    folder = Path(config.model_path)
    hashed.update((folder / "config.json").read_bytes())
    if config.load_format != "dummy":
        for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
            _add_samples(hashed, file)
    return hashed.hexdigest()


def _add_samples(hashed: "hashlib.blake2b", file: Path) -> None:
    size = file.stat().st_size
    hashed.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as content:
        for number in range(SAMPLES):
            content.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            hashed.update(content.read(SAMPLE_BYTES))
