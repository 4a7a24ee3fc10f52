"""``/v1/completions``: the continuation of a text or of token ids."""

from collections import defaultdict
from typing import Any

import msgspec
from fastapi import Response

from radixrt.api.answering import ChoiceDelta, OpenAIFormatter, PreparedRequest, respond
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.logprobs import CompletionLogprobs, KeptMass
from radixrt.api.requests.constraint import asked_constraint, streams_values
from radixrt.api.requests.options import generation_options, request_id, wants_receipt
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import CompletionRequest, refuse_unsupported
from radixrt.api.responses import (
    prompt_extras,
    receipt_extras,
    structured_extras,
    value_events,
)
from radixrt.api.state import Context, ServerState
from radixrt.base.errors import RequestError, wrong
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import FimPrompt, GenerateRequest, Prompt, Tenant, TextPrompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def _refuse_unsupported_fields(body: dict[str, Any]) -> None:
    """Raises RequestError if the body has a field that this server would have to ignore, such as
    those of tools."""
    if body.get("tools") or body.get("tool_choice") not in (None, "none", "auto"):
        raise RequestError(
            "A completion calls no tools; leave tools and tool_choice out, or send a chat to /v1/chat/completions.",
            param="tools",
        )
    refuse_unsupported(body)


routes = Endpoints()


@routes.takes("/v1/completions", CompletionRequest, _refuse_unsupported_fields)
async def completions(fields: CompletionRequest, context: Context) -> Response:
    prepared = prepare_completion(fields, context)
    return await respond(_Completion(prepared, context.state), context)


def prepare_completion(
    fields: CompletionRequest,
    context: Context,
    fim: FimPrompt | None = None,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> PreparedRequest[CompletionRequest]:
    """Read a request for completions, in OpenAI's form or translated from another API's.

    Args:
        fim: the prompt, in place of that of the fields.
        default_max_tokens: None: as many as fit.

    Raises:
        RequestError: a field is out of its range, or does not fit the others; names it.
    """
    continuation = Continuation.find(fields, "text", context)
    prompts: list[Prompt] = [] if fim is None else [fim]
    if fim is None:
        given, special = _whole_prompt(fields, continuation), fields.add_special_tokens is not False
        prompts = parse_prompts(given, context.state, special, fields.n or 1)
    if fields.suffix:
        prompts = _with_suffix(prompts, fields.suffix, fields)
    constraint, field = asked_constraint(fields, context.state.config)
    overrides = _overrides(fields, context.tenant, default_max_tokens)
    options = generation_options(fields, context, constraint, len(prompts), **overrides)
    if fields.best_of not in (None, options.sampling.n):
        raise wrong("best_of", "must equal n, or be left out")
    if constraint is not None and fields.max_tokens == 0:
        raise wrong(
            "max_tokens",
            "is 0, so there is no answer to hold to a constraint; leave one of them out",
        )
    response_id = request_id("cmpl", fields.rid, fields.request_id)
    recorder = continuation.recorder(fields, response_id, str(fields.prompt))
    requests = [
        GenerateRequest(
            request_id=f"{response_id}-{number}",
            group_id=response_id,
            prompt=prompt,
            options=options,
            stream=bool(fields.stream),
            return_prompt_token_ids=bool(fields.return_token_ids or fields.echo),
            constraint=constraint,
            stream_values=streams_values(fields, constraint),
            receipt=wants_receipt(fields, context),
        )
        for number, prompt in enumerate(prompts)
    ]
    return PreparedRequest(response_id, requests, field, fields, recorder)


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


def _with_suffix(prompts: list[Prompt], suffix: str, fields: CompletionRequest) -> list[Prompt]:
    """Raises RequestError if a prompt is not text, or another field needs a prompt that is one
    text."""
    for name in ("echo", "keep", "continue_from"):
        if getattr(fields, name):
            raise RequestError(f"suffix and {name} exclude each other.", param=name)
    found: list[Prompt] = []
    for prompt in prompts:
        if not isinstance(prompt, TextPrompt):
            raise RequestError("With suffix, the prompt must be text.", param="prompt")
        found.append(FimPrompt(prompt.text, suffix, add_special_tokens=prompt.add_special_tokens))
    return found


def _overrides(
    fields: CompletionRequest, tenant: Tenant, default_max_tokens: int | None
) -> dict[str, Any]:
    """The sampling settings that differ from the request's fields.

    With ``max_tokens`` 0, which scores a text with ``echo``, one token is generated and thrown
    away.

    Raises:
        RequestError: ``max_tokens`` is 0 without ``echo``.
    """
    overrides: dict[str, Any] = {"logprobs": fields.logprobs}
    if fields.max_tokens == 0:
        if not fields.echo:
            raise wrong("max_tokens", "must be at least 1 without echo")
        overrides["max_tokens"] = 1
    elif fields.max_tokens is None and default_max_tokens is not None:
        overrides["max_tokens"] = max(tenant.at_most(default_max_tokens), fields.min_tokens or 0)
    if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
        overrides["prompt_logprobs"] = fields.logprobs
    return overrides


class _Completion(OpenAIFormatter[CompletionRequest]):
    kind = kind_of_event = "text_completion"

    def __init__(self, prepared: PreparedRequest[CompletionRequest], state: ServerState) -> None:
        self.hides_output = prepared.fields.max_tokens == 0
        super().__init__(prepared, state)
        self._kept_mass: defaultdict[int, KeptMass] = defaultdict(KeptMass)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)
        """The log-probabilities of each choice."""

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> list[ChoiceDelta]:
        if chunk.progress is not None:
            return [self.progress(prompt_index, chunk, {"text": ""})]
        self._usage.add(prompt_index, chunk)
        index = prompt_index * self.prepared.requests[0].sampling.n + chunk.index
        hidden = self.hides_output
        text, finish_reason = chunk.text, chunk.finish_reason
        tokens = [] if hidden or chunk.logprobs is None else [chunk.logprobs]
        if hidden:
            text = ""
            finish_reason = "length" if finish_reason else None
        beside = self.beside_first(chunk, text, []) if index == 0 else {}
        if chunk.prompt is not None and self.fields.echo:
            text = chunk.prompt.text + text
            if chunk.prompt.logprobs is not None:
                tokens.insert(0, chunk.prompt.logprobs)
        choice = {
            "index": index,
            "text": text,
            "logprobs": (
                None if chunk.logprobs is None else await self._logprobs[index].json(*tokens)
            ),
            "finish_reason": finish_reason,
            "stop_reason": chunk.report.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if hidden else unpack_ids(chunk.token_ids).tolist()
        if not hidden:
            choice |= self._kept_mass[index].after(chunk.log_kept_masses)
        choice |= value_events(chunk) | receipt_extras(chunk) | await self._prompt_extras(chunk)
        return [(choice | structured_extras(chunk.report), beside)]

    async def _prompt_extras(self, chunk: AnswerChunk) -> dict[str, Any]:
        if self.fields.prompt_logprobs is None and chunk.prompt is not None:
            without = msgspec.structs.replace(chunk.prompt, logprobs=None)
            chunk = msgspec.structs.replace(chunk, prompt=without)
        return await prompt_extras(chunk, bool(self.fields.return_token_ids))
