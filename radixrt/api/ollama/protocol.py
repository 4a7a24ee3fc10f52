"""The bodies of ``/api/chat`` and ``/api/generate``."""

from typing import Any

import msgspec

from radixrt.api.embeddings.pooled import PooledFields
from radixrt.api.requests.protocol import GenerationFields, RequestBody, refuse_fields
from radixrt.base.errors import RequestError

TAG = ":latest"
"""Ollama's clients may put it behind a model's name."""


class Options(msgspec.Struct, kw_only=True):
    """Sampling settings under Ollama's names. Those that say how a model is loaded (``num_ctx``,
    ``num_gpu``, …) are ignored."""

    num_predict: int | None = None
    """``max_tokens``; below 0: as many as fit."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(GenerationFields, kw_only=True):
    """Common fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    options: Options | None = None
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    think: bool | str | None = None
    """The template's variable ``enable_thinking``; or an effort, ``reasoning_effort`` of chat."""
    keep_alive: float | str | None = None
    """Time for which the request's KV is retained before others': seconds, or a duration such as
    "5m"; below 0: without end; 0: not at all."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        self.model = (self.model or "").removesuffix(TAG) or None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Refused."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(OllamaFields, kw_only=True):
    messages: list[OllamaMessage] | None = None
    """None or empty: the request only asks whether the model is loaded."""
    tools: list[dict[str, Any]] | None = None

    # beyond Ollama's, as in chat
    tool_choice: str | dict[str, Any] | None = None
    replay_reasoning: bool | None = None


class GenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    """None or empty: the request only asks whether the model is loaded."""
    system: str | None = None
    suffix: str | None = None
    """Text behind the answer, for models that fill in the middle."""
    raw: bool | None = None
    """The prompt is not put into the chat template."""


class ShowRequest(RequestBody, kw_only=True):
    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""

    def __post_init__(self) -> None:
        self.model = (self.model or self.name or "").removesuffix(TAG) or None


class OldEmbedRequest(PooledFields, kw_only=True):
    """The body of ``/api/embeddings``, the older form."""

    prompt: str | None = None
    """None or empty: the request only asks whether the model is loaded."""
    options: dict[str, Any] | None = None
    """Accepted, and not used: those of sampling and of loading a model."""
    keep_alive: float | str | None = None
    """Accepted, and not used."""

    def __post_init__(self) -> None:
        self.model = (self.model or "").removesuffix(TAG) or None


class EmbedRequest(OldEmbedRequest, kw_only=True):
    """The body of ``/api/embed``."""

    input: str | list[str] | None = None
    """A text or texts; none: the request only asks whether the model is loaded."""
    truncate: bool | None = None
    """False: an input that is longer than the context is refused. Otherwise it is cut at its
    end."""
    dimensions: int | None = None
    """Length to which the vectors are cut."""


REFUSED = ("images", "template", "context", "width", "height", "steps")
"""Fields that would change the answer."""


def refuse_in_generate(body: dict[str, Any]) -> None:
    """Raises:
    RequestError: the body has a field that this server would have to ignore, such as those of
        tools.
    """
    for name in ("tools", "tool_choice"):
        if body.get(name) not in (None, [], "none", "auto"):
            raise RequestError(
                "/api/generate calls no tools; leave tools and tool_choice out, or send a chat to /api/chat.",
                param=name,
            )
    refuse_fields(body, REFUSED)
