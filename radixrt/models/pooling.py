"""Reads how a checkpoint turns the hidden states of a prompt into numbers: a vector, or scores of
classes. Imports no torch.

Embedding models say it in the files of sentence-transformers: ``modules.json`` names the modules
behind the transformer, and each has a folder with its config. Classifiers say it by their
architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import read_json
from radixrt.models.registry import check_architecture, is_encoder

PoolingMode = Literal["cls", "mean", "last"]
Activation = Literal["none", "sigmoid", "softmax"]

_MODES: dict[str, PoolingMode] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "last": "last", "lasttoken": "last",
}  # fmt: skip
"""Poolings by sentence-transformers' names, of both of its forms of config."""

_CLASSIFIER = "ForSequenceClassification"
"""The end of a classifier's architecture."""
_LOGIT_SCORE = "LogitScore"
"""The module of a checkpoint that judges pairs of texts by the logits of tokens."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The way from hidden states to numbers."""

    task: Literal["embed", "classify"]
    mode: PoolingMode
    """The hidden state that stands for the prompt: the first token's, the last one's, or the mean
    of all."""
    dense: tuple[Path, ...] = ()
    """Folders of linear layers behind the pooling, in their order."""
    normalize: bool = False
    """Vectors are divided by their length."""
    activation: Activation = "none"
    """Function of the scores of a classifier."""
    labels: tuple[str, ...] = ()
    """Names of its classes."""
    dimensions: tuple[int, ...] = ()
    """Lengths for which the vectors were trained to be cut, where the config says so."""
    usual_length: int | None = None
    """Tokens of a prompt that the model is meant for, if these are fewer than its positions."""


def read_pooling(model_dir: Path, config: Mapping[str, Any]) -> Pooling | None:
    """The pooling of a checkpoint; None: it generates text.

    Raises:
        ConfigError: the files are damaged, or ask for something that is not supported.
    """
    architecture = check_architecture(config)
    encodes = is_encoder(architecture)
    if architecture.endswith(_CLASSIFIER):
        return _classifier(config, encodes)
    modules = model_dir / "modules.json"
    if not modules.is_file():
        if encodes:
            return Pooling("embed", "mean")  # the default of sentence-transformers
        is_bare = architecture.endswith("Model")
        return Pooling("embed", "last", normalize=True) if is_bare else None  # vLLM's and SGLang's
    found = _embedder(modules, config)
    if found is not None and not encodes and found.mode != "last":
        raise ConfigError(
            f"{modules} asks for {found.mode} pooling over a decoder, which is not supported: prefixes in the cache have no "
            "hidden states. Supported is the last token's."
        )
    return found


def read_score_tokens(model_dir: Path) -> tuple[int, ...]:
    """Read the tokens of a checkpoint that judges pairs of texts by the next token: relevant and,
    perhaps, not.

    Raises:
        ConfigError: the files are damaged.
    """
    modules = model_dir / "modules.json"
    for module in read_json(modules, list) if modules.is_file() else ():
        if _kind(module) == _LOGIT_SCORE:
            config = read_json(model_dir / str(module.get("path")) / "config.json", dict)
            found = (config.get("true_token_id"), config.get("false_token_id"))
            return tuple(token for token in found if isinstance(token, int))
    return ()


def _classifier(config: Mapping[str, Any], is_encoder: bool) -> Pooling:
    named = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    labels = tuple(str(label) for _, label in sorted(named.items(), key=lambda one: int(one[0])))
    several = config.get("problem_type") == "multi_label_classification"
    activation: Activation = "sigmoid" if len(labels) == 1 or several else "softmax"
    own = config.get("sentence_transformers") or {}
    asked = str(
        own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or ""
    )
    if asked.endswith("Identity"):
        activation = "none"
    return Pooling(
        "classify", "cls" if is_encoder else "last", activation=activation, labels=labels
    )


def _embedder(modules: Path, config: Mapping[str, Any]) -> Pooling | None:
    folder = modules.parent
    mode: PoolingMode | None = None
    normalize, dense = False, []
    for module in read_json(modules, list):
        path = folder / str(module.get("path") or "")
        match _kind(module):
            case "Transformer" if path == folder:
                pass
            case "Pooling":
                mode = _mode(path / "config.json")
            case "Dense":
                dense.append(path)
            case "Normalize":
                normalize = True
            case kind if kind == _LOGIT_SCORE:
                return None
            case _:
                raise ConfigError(
                    f"{modules} names the module {module.get('type')} in {module.get('path')!r}, which is not supported."
                )
    if mode is None:
        raise ConfigError(f"{modules} names no pooling.")
    return Pooling(
        "embed",
        mode,
        dense=tuple(dense),
        normalize=normalize,
        dimensions=tuple(config.get("matryoshka_dimensions") or ()),
        usual_length=_usual_length(folder),
    )


def _kind(module: Mapping[str, Any]) -> str:
    """The class of a module, without its package: that has changed with the releases of
    sentence-transformers."""
    return str(module.get("type")).rpartition(".")[2]


def _mode(file: Path) -> PoolingMode:
    config = read_json(file, dict)
    names = [config["pooling_mode"]] if "pooling_mode" in config else []
    names += [name for name in config if name.startswith("pooling_mode_") and config[name] is True]
    modes = [str(name).removeprefix("pooling_mode_") for name in names]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"{file} asks for {' and '.join(modes) or 'no'} pooling; supported are cls, mean and lasttoken."
        )
    return _MODES[modes[0]]


def _usual_length(folder: Path) -> int | None:
    """``max_seq_length``, where sentence-transformers would cut a text."""
    file = folder / "sentence_bert_config.json"
    length = read_json(file, dict).get("max_seq_length") if file.is_file() else None
    return length if isinstance(length, int) and length > 0 else None
