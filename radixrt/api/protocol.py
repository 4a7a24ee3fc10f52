"""Which fields do OpenAI requests have here, and which are refused because they would be ignored?"""

from typing import Any

import msgspec

from radixrt.errors import RequestError


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class GenerationFields(msgspec.Struct, kw_only=True):
    """What completions and chat have in common. None: not given."""

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
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    """Prefixes are shared only among requests with the same salt."""
    timeout: float | None = None
    """Seconds after which the request is dropped, with finish reason "abort"."""


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable for the template; models without such a one answer as ever."""
    parallel_tool_calls: bool | None = None
    """Accepted: the model decides."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


UNSUPPORTED = (
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag",
    "stop_regex", "functions", "function_call", "suffix", "use_beam_search", "length_penalty",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "thinking_token_budget", "documents",
    "chat_template", "lora_path", "image_data", "video_data", "audio_data", "audio", "modalities",
    "input_embeds", "prompt_embeds", "session_params", "extra_key", "custom_logit_processor",
    "logits_processors", "return_hidden_states", "token_ids_logprob",
)  # fmt: skip
"""Fields that change what an answer holds; to ignore one would be to answer another question."""

_WITHOUT_EFFECT = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "length_penalty": 1,
}
"""Values of unsupported fields that ask for what happens anyway."""


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or value is False or value in ("", []):
        return True
    return name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises:
    RequestError: the body asks for what this version can't do, and would have to ignore.
    """
    for name in UNSUPPORTED:
        if name in body and not _asks_for_nothing(name, body[name]):
            raise RequestError(
                f"{name} is not supported by this version of the server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    tool_choice = body.get("tool_choice")
    if tool_choice not in (None, "none", "auto"):
        raise RequestError(
            'tool_choice must be "auto" or "none"; this version of the server can\'t force a tool call.',
            param="tool_choice",
            code="unsupported_parameter",
        )
