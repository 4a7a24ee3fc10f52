"""Chooses and loads the draft head of a model."""

import logging
from collections.abc import Callable
from pathlib import Path

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.quantization.scheme import ROUNDINGS
from radixrt.messages.answers import EngineInfo
from radixrt.models.checkpoint import unreadable
from radixrt.models.decoder import CausalLM
from radixrt.models.draft_head import DraftHead
from radixrt.models.eagle3 import load_head
from radixrt.models.head_files import eagle_folder, has_mtp
from radixrt.models.mtp import load_mtp_head

log = logging.getLogger(__name__)


def why_no_head(
    config: ServerConfig, model: CausalLM, info: EngineInfo, *, eagle: bool
) -> str | None:
    """A sentence that says why no head drafts for a model under these settings; None: one can.

    Args:
        eagle: the head is EAGLE-3's, which reads states between the layers.
    """
    if not info.device.startswith("cpu"):
        return "Not yet: a draft head on a GPU"
    if config.tp > 1:
        return "Not yet: a draft head with --tp"
    if info.pooling is not None:
        return "The model generates nothing"
    if not eagle:
        return None
    if any(spec.tensors for spec in model.state_specs()):
        return f"Not yet: an EAGLE-3 head of a model with recurrent layers ({info.architecture})"
    if type(model).forward is not CausalLM.forward:
        return f"Not yet: an EAGLE-3 head of {info.architecture}"
    if info.vision is not None:
        return f"Not yet: an EAGLE-3 head of a model that sees images ({info.architecture})"
    return None


def load_draft_head(
    config: ServerConfig, model: CausalLM, info: EngineInfo, kernels: LayerKernels
) -> DraftHead | None:
    """The head of a model; None: it has none.

    Raises:
        ConfigError: the settings ask for one that cannot be served.
    """
    folder = eagle_folder(config)
    asked = config.draft_model is not None or config.speculation == "head"
    if folder is None and not has_mtp(config):
        if asked:
            raise ConfigError("--speculation head needs a head: give its folder by --draft-model.")
        return None
    reason = why_no_head(config, model, info, eagle=folder is not None)
    if reason is not None:
        if asked:
            raise ConfigError(f"--draft-model: {reason}; leave it out.")
        log.info("Tokens are drafted from text alone. %s.", reason)
        return None
    length = info.context_length
    if folder is not None:
        scheme = ROUNDINGS.get(config.quantization)
        return _read(folder, lambda: load_head(folder, model, length, kernels, scheme))
    own = Path(config.model_path)
    try:
        return _read(own, lambda: load_mtp_head(own, model, length, kernels, config.quantization))
    except ConfigError as error:
        if asked:
            raise
        log.warning("Tokens are drafted from text alone. The layer for further tokens: %s", error)
        return None


def _read(folder: Path, load: Callable[[], DraftHead]) -> DraftHead:
    try:
        return load()
    except ConfigError:
        raise
    except Exception as error:
        raise unreadable(folder, error) from error


def speculation_of(config: ServerConfig, device: str, head: DraftHead | None) -> str:
    """What tokens are drafted from, for people: ``text``, ``text, head``, ``text, mtp``, ``head``
    or ``mtp``; "": nothing is drafted."""
    if config.speculation == "off" or device != "cpu":
        return ""
    sources = ["text"] if config.speculation != "head" else []
    return ", ".join(sources if head is None else [*sources, head.drafter])
