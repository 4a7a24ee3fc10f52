"""Chooses and loads the draft head of a model."""

import logging
from pathlib import Path

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.quantization.scheme import ROUNDINGS
from radixrt.messages.answers import EngineInfo
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.decoder import CausalLM
from radixrt.models.eagle3 import FOLDER, Eagle3Head, load_head

log = logging.getLogger(__name__)


def head_folder(config: ServerConfig) -> Path | None:
    """The folder of the head that the settings ask for, or else that comes with the checkpoint;
    None: there is none, or text alone is to be drafted from."""
    if config.speculation not in ("auto", "head"):
        return None
    if config.draft_model is not None:
        return resolve_model_path(config.draft_model, "--draft-model")
    own = Path(config.model_path) / FOLDER
    return own if own.is_dir() and config.load_format != "dummy" else None


def why_no_head(config: ServerConfig, model: CausalLM, info: EngineInfo) -> str | None:
    """A sentence that says why no head drafts for a model under these settings; None: one can."""
    if not info.device.startswith("cpu"):
        return "Not yet: a draft head on a GPU"
    if config.tp > 1:
        return "Not yet: a draft head with --tp"
    if any(spec.tensors for spec in model.state_specs()):
        return f"Not yet: a draft head of a model with recurrent layers ({info.architecture})"
    if type(model).forward is not CausalLM.forward:
        return f"Not yet: a draft head of {info.architecture}"
    if info.vision is not None:
        return f"Not yet: a draft head of a model that sees images ({info.architecture})"
    if info.pooling is not None:
        return "The model generates nothing"
    return None


def load_draft_head(
    config: ServerConfig, model: CausalLM, info: EngineInfo, kernels: LayerKernels
) -> Eagle3Head | None:
    """The head of a model; None: it has none.

    Raises:
        ConfigError: the settings ask for one that cannot be served.
    """
    folder = head_folder(config)
    asked = config.draft_model is not None or config.speculation == "head"
    if folder is None:
        if asked:
            raise ConfigError("--speculation head needs a head: give its folder by --draft-model.")
        return None
    if (reason := why_no_head(config, model, info)) is not None:
        if asked:
            raise ConfigError(f"--draft-model: {reason}; leave it out.")
        log.info("Tokens are drafted from text alone. %s.", reason)
        return None
    scheme = ROUNDINGS.get(config.quantization)
    return load_head(folder, model, info.context_length, kernels, scheme)


def speculation_of(config: ServerConfig, device: str, head: Eagle3Head | None) -> str:
    """What tokens are drafted from, for people: ``text``, ``text, head`` or ``head``; "": nothing
    is drafted."""
    if config.speculation == "off" or device != "cpu":
        return ""
    sources = ["text"] if config.speculation != "head" else []
    return ", ".join([*sources, "head"] if head is not None else sources)
