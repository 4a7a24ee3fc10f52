"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from typing import Any

import msgspec

from radixrt.api.requests.protocol import UNSUPPORTED, CacheControl, GenerationFields

Blocks = str | list[dict[str, Any]]
"""Content: a text, or content blocks."""


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    """"user" or "assistant"; also "system", as some clients write it."""
    content: Blocks


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    """``reasoning_effort`` of chat."""
    format: dict[str, Any] | None = None
    """``{"type": "json_schema", "schema": ...}``."""


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    """"enabled", "adaptive" or "disabled"; the template's variable ``enable_thinking``."""
    budget_tokens: int | None = None
    """``max_reasoning_tokens`` of chat; without effect where no reasoning is parsed."""
    display: str | None = None
    """"omitted": the reasoning is left out of the response."""


class MessagesRequest(GenerationFields, kw_only=True):
    """Anthropic's fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    messages: list[InputMessage]
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older form of ``output_config.format``."""
    cache_control: CacheControl | None = None
    """A cache breakpoint at the end of the last message."""

    # beyond Anthropic's, as in chat
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    replay_reasoning: bool | None = None


class CountTokensRequest(MessagesRequest, kw_only=True):
    """The fields of a request for a message, of which only those of the prompt are read."""


REFUSED = (*UNSUPPORTED, "mcp_servers", "container", "inference_geo")
"""Fields that would change the answer: those that chat refuses, and further ones."""
