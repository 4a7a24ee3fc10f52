"""A language for programs of many model calls. See docs/lang.md.

It needs neither torch nor a model in this process.
"""

from typing import TYPE_CHECKING, Any

from radixrt.lang.backends.openai import OpenAI
from radixrt.lang.backends.protocol import PartialValue, Sampling
from radixrt.lang.backends.server import Server, set_default_backend
from radixrt.lang.batch import FailedRun
from radixrt.lang.errors import (
    AnswerError,
    BackendError,
    BadRequest,
    Cancelled,
    ConnectionLost,
    LangError,
    ProgramError,
    ServerFailed,
    UnknownVariable,
    UnsupportedFeature,
)
from radixrt.lang.expressions import assistant, documents, gen, image, select, system, user
from radixrt.lang.function import Function, function
from radixrt.lang.runtime.cached_order import order_documents
from radixrt.lang.state import Forks, State
from radixrt.lang.stream import Stream
from radixrt.lang.tools import ToolAnswer, ToolCall, tool
from radixrt.lang.tracing.recorder import Recorder as trace
from radixrt.lang.tracing.recorder import Trace

if TYPE_CHECKING:
    from radixrt.lang.backends.engine import Engine

__all__ = [
    "AnswerError",
    "BackendError",
    "BadRequest",
    "Cancelled",
    "ConnectionLost",
    "Engine",
    "FailedRun",
    "Forks",
    "Function",
    "LangError",
    "OpenAI",
    "PartialValue",
    "ProgramError",
    "Sampling",
    "Server",
    "ServerFailed",
    "State",
    "Stream",
    "ToolAnswer",
    "ToolCall",
    "Trace",
    "UnknownVariable",
    "UnsupportedFeature",
    "assistant",
    "documents",
    "function",
    "gen",
    "image",
    "order_documents",
    "select",
    "set_default_backend",
    "system",
    "tool",
    "trace",
    "user",
]


def __getattr__(name: str) -> Any:
    """Import :class:`Engine` at its first use: it needs the engine's packages."""
    if name == "Engine":
        from radixrt.lang.backends.engine import Engine

        return Engine
    raise AttributeError(f"module 'radixrt.lang' has no attribute {name!r}")
