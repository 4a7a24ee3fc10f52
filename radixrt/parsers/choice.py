"""Chooses the parsers of a server: those that are set, or those that the chat template and the
vocabulary show."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from radixrt.base.config import ServerConfig
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.reasoning import FORMATS as REASONING_FORMATS
from radixrt.parsers.tool_calls.registry import FORMATS as TOOL_CALL_FORMATS

log = logging.getLogger(__name__)


class _Recognisable(Protocol):
    def recognises(self, marks: ModelMarks) -> bool: ...


def with_parsers(config: ServerConfig) -> ServerConfig:
    """The settings with the names of the parsers instead of ``auto``. Both paths of the settings
    are folders.

    Raises:
        ConfigError: the chat template can't be read.
    """
    if "auto" not in (config.tool_call_parser, config.reasoning_parser):
        return config
    folder = Path(config.tokenizer_path or config.model_path)
    marks = ModelMarks.from_checkpoint(folder, config.chat_template)
    chosen: dict[str, Any] = {
        name: _recognised(formats, marks, flag)
        for name, formats, flag in (
            ("tool_call_parser", TOOL_CALL_FORMATS, "--tool-call-parser"),
            ("reasoning_parser", REASONING_FORMATS, "--reasoning-parser"),
        )
        if getattr(config, name) == "auto"
    }
    return dataclasses.replace(config, **chosen)


def _recognised(formats: Mapping[str, _Recognisable], marks: ModelMarks, flag: str) -> str:
    names = [name for name, format in formats.items() if format.recognises(marks)]
    if len(names) > 1:
        log.warning(
            "The chat template has the marks of several formats (%s), so none is used. Set %s to the model's.",
            ", ".join(names),
            flag,
        )
    return names[0] if len(names) == 1 else "none"
