"""Chooses the parsers of a server: those that are set, or those that the chat template and the
vocabulary show."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixrt.base.config import ServerConfig
from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.reasoning import FORMATS as REASONING_FORMATS
from radixrt.parsers.reasoning import ReasoningFormat
from radixrt.parsers.tool_calls.format import ToolCallFormat
from radixrt.parsers.tool_calls.registry import FORMATS as TOOL_CALL_FORMATS

log = logging.getLogger(__name__)


_FORMATS: dict[str, Mapping[str, ToolCallFormat | ReasoningFormat]] = {
    "tool_call_parser": TOOL_CALL_FORMATS,
    "reasoning_parser": REASONING_FORMATS,
}


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
    chosen: dict[str, Any] = {}
    for name, formats in _FORMATS.items():
        if getattr(config, name) != "auto":
            continue
        found = [key for key, format in formats.items() if format.recognises(marks)]
        if len(found) > 1:
            log.warning(
                "The chat template has the marks of several formats (%s), so none is used. Set --%s to the model's.",
                ", ".join(found),
                name.replace("_", "-"),
            )
        chosen[name] = found[0] if len(found) == 1 else "none"
    return dataclasses.replace(config, **chosen)
