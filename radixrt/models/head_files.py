"""Finds the files of a draft head: an EAGLE-3 head in a folder of its own, or the layer of a
checkpoint that predicts further tokens (MTP). Imports no torch, since the supervisor counts their
memory too."""

from collections.abc import Iterable
from pathlib import Path

from radixrt.base.config import ServerConfig
from radixrt.models.checkpoint import (
    INDEX_FILE,
    read_config,
    read_header,
    read_json,
    resolve_model_path,
    text_config,
    weight_files,
)
from radixrt.models.gguf.folder import gguf_tensors

FOLDER = "eagle3"
"""The folder of an EAGLE-3 head inside that of its checkpoint, where it is found without a
setting."""

QWEN = "mtp."
"""The prefix of the tensors of the further layer in checkpoints of Qwen."""

FREQUENT_IDS = 32768
"""Ids that an MTP layer drafts where the vocabulary is large."""

OWN_IDS = 32768
"""Further ids of texts that it drafts there: at most so many rows, of all cache roots together."""

_FAMILIES = ("DeepseekV3For", "Glm4MoeFor", "Glm4MoeLiteFor", "Qwen3NextFor", "Qwen3_5For", "Qwen3_5MoeFor")  # fmt: skip
"""Beginnings of the architectures that are served with one."""


def eagle_folder(config: ServerConfig) -> Path | None:
    """The folder of the EAGLE-3 head that the settings ask for, or else that comes with the
    checkpoint; None: there is none, or text alone is to be drafted from."""
    if not _may_have_head(config):
        return None
    if config.draft_model is not None:
        return resolve_model_path(config.draft_model, "--draft-model")
    own = Path(config.model_path) / FOLDER
    return own if own.is_dir() and config.load_format != "dummy" else None


def has_mtp(config: ServerConfig) -> bool:
    """Whether the checkpoint's further layer is to draft."""
    if not _may_have_head(config) or config.load_format == "dummy":
        return False
    return eagle_folder(config) is None and further_prefix(Path(config.model_path)) is not None


def _may_have_head(config: ServerConfig) -> bool:
    return config.speculation in ("auto", "head")


def further_prefix(folder: Path) -> str | None:
    """The prefix of the names of the further layer's tensors, in GGUF files as if they were named as in a
    checkpoint; None: the model has no such layer, or the files lack its tensors.

    Raises:
        ConfigError: a file cannot be read.
    """
    config = read_config(folder)
    if not (config.get("architectures") or [""])[0].startswith(_FAMILIES):
        return None
    last = text_config(config)["num_hidden_layers"]
    layer = f"model.layers.{last}."
    if (entries := gguf_tensors(folder)) is not None:
        names = {entry.name for entry in entries}
        return layer if f"blk.{last}.nextn.eh_proj.weight" in names else None
    names = set(_names(folder))
    for prefix, projection in ((layer, "eh_proj.weight"), (QWEN, "fc.weight")):
        if prefix + projection in names:
            return prefix
    return None


def drafted_ids(vocab_size: int) -> int:
    """The number of the lowest ids that an MTP layer drafts: the LM head's product with all would
    take most of its time.

    Byte-level BPE numbers its tokens in the order in which its training merged them, most frequent
    pairs first.

    >>> drafted_ids(248_320), drafted_ids(50_000)
    (32768, 50000)
    """
    return FREQUENT_IDS if vocab_size >= 2 * FREQUENT_IDS else vocab_size


def _names(folder: Path) -> Iterable[str]:
    """The names of all tensors in safetensors files."""
    if (index := folder / INDEX_FILE).is_file():
        weight_files(folder)  # checks it
        return list(read_json(index)["weight_map"])
    return [name for file in weight_files(folder) for name in read_header(file)]
