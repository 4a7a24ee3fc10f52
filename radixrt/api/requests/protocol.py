"""The fields of requests, as structs; their greatest lengths; and the unsupported fields, which are
refused rather than ignored."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from radixrt.base.errors import RequestError, shown, wrong
from radixrt.base.sampling_params import MAX_LOGIT_BIAS
from radixrt.kv.cache_hint import CacheHint

Translation = TypeVar("Translation", bound="GenerationFields")

MAX_ENTRIES: Mapping[str, int] = {
    "messages": 10_000,
    "input": 10_000,
    "tools": 1024,
    "logit_bias": MAX_LOGIT_BIAS,
    "chat_template_kwargs": 1024,
}
"""Most entries of lists and objects, by field, so that no request takes long to check. Other fields
have limits of their own where they are read."""

MAX_CHARACTERS: Mapping[str, int] = {
    "cache_salt": 1024,
    "model": 1024,
    "continue_from": 1024,
    "previous_response_id": 1024,
    "lease": 1024,
    "guided_decoding_backend": 1024,
    "reasoning_effort": 1024,
}
"""Most characters of strings, by field."""


TTL_S = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}
"""Seconds of each lifetime that OpenAI's fields about the cache have."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form: a constraint and options in one object."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[Any] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None
    """Accepted: there is no fallback."""
    disable_any_whitespace: bool | None = None
    """Refused unless it is the server's way."""
    disable_additional_properties: bool | None = None
    """Refused."""
    whitespace_pattern: str | None = None
    """Refused unless it is the server's."""


class RequestBody(msgspec.Struct, kw_only=True):
    """Every JSON body has a cache salt. So no endpoint can take a prompt that is not put into the
    namespace of its caller."""

    cache_salt: str | None = None
    """Prefixes are shared only among requests with the same salt."""


class ConstraintFields(RequestBody, kw_only=True):
    """The constraint on an answer: at most one of these. See docs/structured_output.md."""

    response_format: dict[str, Any] | None = None
    """OpenAI's: type text, json_object or json_schema; and structural_tag."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    """Refused unless it is the server's."""
    guided_whitespace_pattern: str | None = None
    """Refused unless it is the server's."""
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    """llama.cpp's: EBNF; empty means none."""
    structural_tag: dict[str, Any] | str | None = None
    property_order: str | None = None
    """Order of properties in the objects of a JSON schema: "any", or "schema", the default."""


class QueueFields(RequestBody, kw_only=True):
    """Fields of every request that computes something; see :class:`GenerationFields` for their
    meaning."""

    cache: CacheHint | None = None
    priority: int | None = None
    timeout: float | None = None
    speculation: bool | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """OpenAI's options of the prompt cache."""

    mode: str | None = None
    """"implicit" or "explicit": ``ttl`` is for the breakpoints only."""
    ttl: str | None = None
    """"30m": retention level "high" for this time, of the whole request, and of breakpoints that
    have no time."""


class GenerationFields(ConstraintFields, kw_only=True):
    """Common fields of completions and chat. None: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    """Accepted, and not used."""
    rid: str | None = None
    """The id of the response, for /abort_request; by default a new one."""
    request_id: str | None = None
    """The same."""

    # beyond OpenAI, under the names that other servers use
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    max_reasoning_tokens: int | None = None
    """Most tokens of a chat's reasoning, with its tags."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    kept_mass: bool | None = None
    """Return the probability that the constraint left, of each token and of the answer."""
    receipt: bool | None = None
    """Return each answer's receipt."""
    return_token_ids: bool | None = None
    cache: CacheHint | None = None
    """Cache hint: the client's knowledge of the future use of this request's KV."""
    priority: int | None = None
    """The smallest goes first, where the server was started with --schedule-policy priority."""
    timeout: float | None = None
    """Seconds after which the request is dropped, with finish reason "abort"."""
    speculation: bool | None = None
    """False: no tokens of the answers are drafted."""
    keep: bool | None = None
    """Keep the conversation, with the first answer, under the response's id."""
    continue_from: str | None = None
    """The id of a kept conversation; the request has only the messages or the text after it."""
    continue_after: int | None = None
    """Number of its messages (of a text: characters) to continue from; None: all."""
    stream_values: bool | None = None
    """Events of a stream say when each value of the JSON begins and when it is complete."""
    return_times: bool | None = None
    """Return the times of the first answer, in seconds: queued, prefill, total."""

    # OpenAI's, about the cache
    prompt_cache_key: str | None = None
    """The session of ``cache``."""
    prompt_cache_retention: str | None = None
    """"24h": retention level "high" for this time; "in_memory"."""
    prompt_cache_options: PromptCacheOptions | None = None

    def translated(self, into: type[Translation], **fields: Any) -> Translation:
        """This request in the form of another API.

        Args:
            fields: those that have another name or value there; the others that both have stay as
                they are.

        Raises:
            RequestError: a translated field is too long.
        """
        check_lengths({name: fields.get(name) for name in ("messages", "reasoning_effort")})
        shared = set(self.__struct_fields__) & set(into.__struct_fields__)
        return into(**{name: getattr(self, name) for name in shared} | fields)


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    suffix: str | None = None
    """Text behind the answer, for models that fill in the middle."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    return_progress: bool | None = None
    """llama.cpp's: events of a stream tell how much of the prompt is computed."""
    add_special_tokens: bool | None = None


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A cache breakpoint, as Anthropic's clients mark it: keep the KV up to here."""

    type: str
    """"ephemeral"."""
    ttl: str | None = None
    """"5m", the default, or "1h"."""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None


class KeepRequest(RequestBody, kw_only=True):
    """One prompt, of messages or as a text, alone or behind a kept conversation."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    continue_from: str | None = None
    continue_after: int | None = None


class PromptRequest(QueueFields, kw_only=True):
    """One prompt to compute without an answer. Its fields are the same as in chat and
    completions."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    continue_from: str | None = None
    continue_after: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    replay_reasoning: bool | None = None
    rid: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """OpenAI's predicted output."""

    type: str
    """"content"."""
    content: str | list[dict[str, Any]]
    """A text, or parts of type "text"."""

    def text(self) -> str:
        """Raises RequestError if it is not of the kind "content", or a part is not text."""
        if self.type != "content":
            raise RequestError(
                f'prediction.type must be "content", not {shown(self.type)}.', param="prediction"
            )
        if isinstance(self.content, str):
            return self.content
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise RequestError(
                'The parts of prediction.content must be {"type": "text", "text": …}.',
                param="prediction",
            )
        return "".join(map(str, texts))


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable for the template; templates without this variable ignore it."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    """The answer as the client expects it, from which tokens are drafted."""
    parallel_tool_calls: bool | None = None
    """False: at most one call an answer."""
    include_reasoning: bool | None = None
    """False: the reasoning is left out of the response."""
    separate_reasoning: bool | None = None
    """False: the reasoning stays in the content."""
    replay_reasoning: bool | None = None
    """Repeat earlier answers of the model as it generated them, with their reasoning."""
    return_progress: bool | None = None
    """llama.cpp's: events of a stream tell how much of the prompt is computed."""


UNSUPPORTED = (
    "stop_regex", "functions", "function_call", "use_beam_search", "length_penalty",
    "truncate_prompt_tokens", "thinking_token_budget", "thinking_budget", "documents",
    "chat_template", "lora_path", "image_data", "video_data", "audio_data", "audio", "modalities",
    "input_embeds", "prompt_embeds", "session_params", "extra_key", "custom_logit_processor",
    "logits_processors", "return_hidden_states", "token_ids_logprob", "grammar_lazy",
)  # fmt: skip
"""Fields that would change the answer, so that ignoring them would be wrong."""

_WITHOUT_EFFECT = {"modalities": ["text"], "length_penalty": 1}
"""Values of unsupported fields that change nothing and are accepted."""


def refuse_unsupported(body: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raises RequestError if the body has a field that this version does not support, or one of
    ``also``."""
    for name in (*UNSUPPORTED, *also):
        value = body.get(name)
        asks = value is not None and value is not False and value not in ("", [], {})
        if asks and value != _WITHOUT_EFFECT.get(name):
            raise RequestError(
                f"{name} is not supported by this version of the server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def check_lengths(body: Mapping[str, Any]) -> None:
    """Raises RequestError if a field is too long; names it and its limit."""
    for name, limit in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise _too_long(name, len(value), limit, "entries")
    for name, limit in MAX_CHARACTERS.items():
        value = body.get(name)
        if isinstance(value, str) and len(value) > limit:
            raise _too_long(name, len(value), limit, "characters")


def _too_long(name: str, size: int, limit: int, unit: str) -> RequestError:
    return wrong(name, f"has {size} {unit}; at most {limit} are taken")
