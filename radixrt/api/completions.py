"""``/v1/completions``: text or token ids in, their continuation out."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.continuation import Continuation, Keeper, owner_of
from radixrt.api.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.formats import Usage, completion_logprobs, prompt_extras, times_extras
from radixrt.api.protocol import CompletionRequest, refuse_unsupported
from radixrt.api.sampling import deadline, priority, sampling_from_fields
from radixrt.api.state import ServerState, request_id
from radixrt.api.structured import (
    asked_constraint,
    constraint_field,
    structured_extras,
)
from radixrt.cache_hint import hints_of
from radixrt.constrained.requests import check_sampling
from radixrt.errors import RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import GenerateRequest, Prompt, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        fields = to_struct(body, CompletionRequest)
        state.check_model(fields.model)
        completion = _Completion.plan(fields, state, owner_of(request, fields.cache_salt))
        request.state.request_id = completion.id
        if fields.stream:
            return EventStream(_stream(completion, state))
        return json_response(await while_connected(request, _whole(completion, state)))

    return router


@dataclasses.dataclass(frozen=True)
class _Completion:
    """A request, ready to run."""

    fields: CompletionRequest
    id: str
    requests: list[GenerateRequest]
    """One a prompt."""
    prompt_only: bool
    """max_tokens was 0: one token is generated and thrown away (to score a text, with echo)."""
    keeper: Keeper | None
    """Of a text that is to be remembered."""

    @staticmethod
    def plan(fields: CompletionRequest, state: ServerState, owner: bytes) -> "_Completion":
        continuation = Continuation.of(fields, "text", owner, state.conversations)
        prompts = parse_prompts(
            _whole_prompt(fields, continuation),
            state.info.vocab_size,
            fields.add_special_tokens is not False,
        )
        prompt_only = fields.max_tokens == 0
        if prompt_only and not fields.echo:
            raise RequestError("max_tokens must be at least 1 without echo.", param="max_tokens")
        overrides: dict[str, Any] = {"logprobs": fields.logprobs}
        if prompt_only:
            overrides["max_tokens"] = 1
        elif fields.max_tokens is None:
            overrides["max_tokens"] = max(DEFAULT_MAX_TOKENS, fields.min_tokens or 0)
        if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
            overrides["prompt_logprobs"] = fields.logprobs
        sampling = sampling_from_fields(
            fields, state.default_sampling, state.info.vocab_size, **overrides
        )
        if fields.best_of not in (None, sampling.n):
            raise RequestError("best_of must equal n, or be left out.", param="best_of")
        state.check_answer_count(len(prompts), sampling.n)
        structured = asked_constraint(fields, state.config)
        check_sampling(structured, sampling)
        if structured is not None and prompt_only:
            raise RequestError(
                "max_tokens is 0, so there is no answer to hold to a constraint; leave one of them out.",
                param="max_tokens",
            )
        hints = hints_of(fields.cache)
        completion_id = request_id("cmpl", fields.rid, fields.request_id)
        requests = [
            GenerateRequest(
                request_id=f"{completion_id}-{number}",
                owner=completion_id,
                prompt=prompt,
                sampling=sampling,
                stream=bool(fields.stream),
                cache_salt=fields.cache_salt or "",
                priority=priority(fields.priority, state.config),
                cache_hints=hints,
                deadline=deadline(fields.timeout),
                return_prompt_token_ids=bool(fields.return_token_ids or fields.echo),
                structured=structured,
            )
            for number, prompt in enumerate(prompts)
        ]
        keeper = None
        if fields.keep:
            keeper = Keeper(state.conversations, completion_id, continuation, str(fields.prompt))
        return _Completion(fields, completion_id, requests, prompt_only, keeper)

    def choice_index(self, prompt_index: int, chunk: AnswerChunk) -> int:
        return prompt_index * self.requests[0].sampling.n + chunk.index

    def choice(self, prompt_index: int, chunk: AnswerChunk, offset: int) -> dict[str, Any]:
        """One element of ``choices``.

        Args:
            offset: characters of this answer's tokens that were given before.
        """
        echoed = chunk.prompt is not None and self.fields.echo
        text, tokens = chunk.text, chunk.logprobs
        if self.prompt_only:
            text, tokens = "", None if tokens is None else []
        if echoed and chunk.prompt is not None:
            text = (chunk.prompt.text or "") + text
            if tokens is not None:
                tokens = [*(chunk.prompt.logprobs or []), *tokens]
        choice = {
            "index": self.choice_index(prompt_index, chunk),
            "text": text,
            "logprobs": completion_logprobs(tokens, offset),
            "finish_reason": "length"
            if self.prompt_only and chunk.finish_reason
            else chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if self.prompt_only else unpack_ids(chunk.token_ids).tolist()
        if chunk.prompt is not None:
            choice |= self._prompt_extras(chunk)
        return choice | structured_extras(chunk)

    def first_answer(self, chunk: AnswerChunk) -> dict[str, Any]:
        """Take note of (a piece of) the first answer; what the response says beside it."""
        extras = times_extras(chunk) if self.fields.return_times else {}
        if self.keeper is not None:
            self.keeper.add_text("" if self.prompt_only else chunk.text)
            if chunk.finish_reason is not None:
                extras["kept"] = self.keeper.end(chunk.finish_reason)
        return extras

    def _prompt_extras(self, chunk: AnswerChunk) -> dict[str, Any]:
        extras = prompt_extras(chunk, bool(self.fields.return_token_ids))
        if self.fields.prompt_logprobs is None:
            extras.pop("prompt_logprobs", None)
        return extras

    def envelope(self, state: ServerState, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.config.model_name,
            "choices": choices,
        }


async def _whole(completion: _Completion, state: ServerState) -> dict[str, Any]:
    usage = Usage()
    choices = []
    extras: dict[str, Any] = {}
    async with aclosing(
        state.generate(completion.requests, constraint_field(completion.fields))
    ) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            choices.append(completion.choice(prompt_index, chunk, 0))
            if completion.choice_index(prompt_index, chunk) == 0:
                extras |= completion.first_answer(chunk)
    choices.sort(key=lambda choice: choice["index"])
    envelope = completion.envelope(state, choices)
    envelope["usage"] = usage.as_json(hide_output=completion.prompt_only)
    return envelope | extras


async def _stream(completion: _Completion, state: ServerState) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    options = completion.fields.stream_options
    offsets: dict[int, int] = {}
    """Of each choice: characters of its tokens so far."""
    async with aclosing(
        state.generate(completion.requests, constraint_field(completion.fields))
    ) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            index = completion.choice_index(prompt_index, chunk)
            choice = completion.choice(prompt_index, chunk, offsets.get(index, 0))
            if choice["logprobs"] is not None:
                tokens = choice["logprobs"]["tokens"]
                offsets[index] = offsets.get(index, 0) + sum(map(len, tokens))
            envelope = completion.envelope(state, [choice])
            if options and options.continuous_usage_stats:
                envelope["usage"] = usage.as_json(completion.prompt_only)
            elif options and options.include_usage:
                envelope["usage"] = None
            if index == 0:
                envelope |= completion.first_answer(chunk)
            yield event(envelope)
    if options and options.include_usage:
        envelope = completion.envelope(state, [])
        envelope["usage"] = usage.as_json(completion.prompt_only)
        yield event(envelope)
    yield DONE


def _whole_prompt(fields: CompletionRequest, continuation: Continuation) -> str | list[Any]:
    """The prompt with what is remembered before it.

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


def parse_prompts(
    prompt: str | list[Any], vocab_size: int, add_special_tokens: bool
) -> list[Prompt]:
    """One prompt a text or a list of token ids.

    Raises:
        RequestError: it is none of the four forms, or an id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one prompt.", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return [TextPrompt(text, add_special_tokens) for text in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [token_prompt(ids, vocab_size) for ids in prompt]
    return [token_prompt(prompt, vocab_size)]


def token_prompt(ids: list[Any], vocab_size: int, field: str = "prompt") -> TokenPrompt:
    """Raises:
    RequestError: it is empty, or not a list of token ids of the vocabulary.
    """
    if not ids:
        raise RequestError(f"{field} is empty; give at least one token.", param=field)
    if set(map(type, ids)) != {int}:
        other = next(value for value in ids if type(value) is not int)
        raise RequestError(
            f"{field} must be text or token ids, one or a list of them, not mixed; it holds {other!r:.50}.",
            param=field,
        )
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"Token id {token_id} is not in the vocabulary; ids go from 0 to {vocab_size - 1}.",
                param=field,
            )
    return TokenPrompt(pack_ids(ids))
