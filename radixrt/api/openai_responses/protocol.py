"""The body of ``/v1/responses``."""

from typing import Any

import msgspec

from radixrt.api.requests.protocol import UNSUPPORTED, GenerationFields, refuse_fields
from radixrt.base.errors import RequestError

Items = str | list[dict[str, Any]]
"""A text of the user, or items: messages, calls of functions and their outputs, reasoning."""

TEXT_LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    """``reasoning_effort`` of chat."""
    summary: str | None = None
    """Any value: the reasoning is returned as a summary, instead of as its text."""
    generate_summary: str | None = None
    """The older name of ``summary``."""


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """Accepted, and not used."""


class ResponsesRequest(GenerationFields, kw_only=True):
    """OpenAI's fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    input: Items | None = None
    instructions: str | None = None
    """The system message. It is not part of the stored response."""
    previous_response_id: str | None = None
    store: bool | None = None
    """True by default: the response can be retrieved, and another can go on from it."""
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    """"disabled": an input that is too long is an error."""
    metadata: dict[str, Any] | None = None
    """Returned as it is."""
    safety_identifier: str | None = None
    """The same."""

    # beyond OpenAI's, as in chat
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    replay_reasoning: bool | None = None


_REFUSED = (*UNSUPPORTED, "background", "conversation", "prompt", "moderation")
"""Fields that would change the answer: those that chat refuses, and further ones."""


def refuse_unsupported_fields(body: dict[str, Any]) -> None:
    """Raises:
    RequestError: the body has a field that this server would have to ignore.
    """
    refuse_fields(body, _REFUSED)
    if body.get("truncation") not in (None, "disabled"):
        raise RequestError(
            'truncation must be "disabled" or left out: this server drops nothing of the input.',
            param="truncation",
        )
