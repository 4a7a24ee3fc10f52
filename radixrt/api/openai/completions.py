"""``/v1/completions``: the continuation of a text or of token ids."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.conversations.continuation import Continuation, ConversationRecorder
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.middleware import request_id
from radixrt.api.openai.answering import Answering, ChoiceDelta, PreparedRequest, respond
from radixrt.api.requests.constraint import asked_constraint, streams_values
from radixrt.api.requests.options import generation_options
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import CompletionRequest
from radixrt.api.responses import (
    completion_logprobs,
    prompt_extras,
    structured_extras,
    value_events,
)
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import GenerateRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/completions", CompletionRequest)
    async def completions(request: Request, fields: CompletionRequest) -> Response:
        return await respond(_Completion(_prepare(fields, state, request)), request, state)

    return router


def _prepare(
    fields: CompletionRequest, state: ServerState, request: Request
) -> PreparedRequest[CompletionRequest]:
    """Raises:
    RequestError: a field is out of its range, or does not fit the others; names it.
    """
    continuation = Continuation.of(fields, "text", state.conversations, request)
    prompts = parse_prompts(
        _whole_prompt(fields, continuation),
        state.info.vocab_size,
        fields.add_special_tokens is not False,
    )
    constraint = asked_constraint(fields, state.config)
    overrides = _overrides(fields)
    options = generation_options(fields, state, constraint.constraint, len(prompts), **overrides)
    if fields.best_of not in (None, options.sampling.n):
        raise RequestError("best_of must equal n, or be left out.", param="best_of")
    if constraint.constraint is not None and fields.max_tokens == 0:
        raise RequestError(
            "max_tokens is 0, so there is no answer to hold to a constraint; leave one of them out.",
            param="max_tokens",
        )
    response_id = request_id("cmpl", fields.rid, fields.request_id)
    recorder = ConversationRecorder.of(
        fields, state.conversations, response_id, continuation, str(fields.prompt)
    )
    requests = [
        GenerateRequest(
            request_id=f"{response_id}-{number}",
            group_id=response_id,
            prompt=prompt,
            options=options,
            stream=bool(fields.stream),
            return_prompt_token_ids=bool(fields.return_token_ids or fields.echo),
            constraint=constraint.constraint,
            stream_values=streams_values(fields, constraint.constraint),
        )
        for number, prompt in enumerate(prompts)
    ]
    return PreparedRequest(fields, response_id, requests, constraint.field, recorder)


def _whole_prompt(fields: CompletionRequest, continuation: Continuation) -> str | list[Any]:
    """The prompt behind the kept text that it goes on from.

    Raises:
        RequestError: it is not one text.
    """
    if not fields.keep and continuation.source is None:
        return fields.prompt
    if not isinstance(fields.prompt, str):
        raise RequestError(
            "keep and continue_from are for a single prompt, as text.", param="prompt"
        )
    return continuation.text + fields.prompt


def _overrides(fields: CompletionRequest) -> dict[str, Any]:
    """The sampling settings that differ from the request's fields.

    With ``max_tokens`` 0, which scores a text with ``echo``, one token is generated and thrown away.

    Raises:
        RequestError: ``max_tokens`` is 0 without ``echo``.
    """
    overrides: dict[str, Any] = {"logprobs": fields.logprobs}
    if fields.max_tokens == 0:
        if not fields.echo:
            raise RequestError("max_tokens must be at least 1 without echo.", param="max_tokens")
        overrides["max_tokens"] = 1
    elif fields.max_tokens is None:
        overrides["max_tokens"] = max(DEFAULT_MAX_TOKENS, fields.min_tokens or 0)
    if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
        overrides["prompt_logprobs"] = fields.logprobs
    return overrides


class _Completion(Answering[CompletionRequest]):
    kind = kind_of_event = "text_completion"

    def __init__(self, prepared: PreparedRequest[CompletionRequest]) -> None:
        super().__init__(prepared)
        self.hides_output = prepared.fields.max_tokens == 0
        self._offsets: Counter[int] = Counter()
        """Of each choice: characters of its tokens so far."""

    def choices(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[ChoiceDelta]:
        index = prompt_index * self.prepared.requests[0].sampling.n + chunk.index
        hidden = self.hides_output
        text, tokens, finish_reason = chunk.text, chunk.logprobs, chunk.finish_reason
        if hidden:
            text, tokens = "", None if tokens is None else []
            finish_reason = "length" if finish_reason else None
        beside = self.beside_first(chunk, text, []) if index == 0 else {}
        if chunk.prompt is not None and self.fields.echo:
            text = chunk.prompt.text + text
            if tokens is not None:
                tokens = [*(chunk.prompt.logprobs or []), *tokens]
        choice = {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(tokens, self._offsets[index]),
            "finish_reason": finish_reason,
            "stop_reason": chunk.report.stop_reason,
        }
        self._offsets[index] += sum(len(token.token) for token in tokens or ())
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if hidden else unpack_ids(chunk.token_ids).tolist()
        choice |= value_events(chunk) | self._prompt_extras(chunk)
        yield choice | structured_extras(chunk.report), beside

    def _prompt_extras(self, chunk: AnswerChunk) -> dict[str, Any]:
        extras = prompt_extras(chunk, bool(self.fields.return_token_ids))
        if self.fields.prompt_logprobs is None:
            extras.pop("prompt_logprobs", None)
        return extras
