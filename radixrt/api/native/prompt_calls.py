"""Endpoints about prompts, texts and constraints that give no answer: tokens, scores of choices,
compiled grammars, kept conversations."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import error_body
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import json_logprob
from radixrt.api.requests.constraint import asked_constraint
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import one_prompt, token_prompt
from radixrt.api.requests.protocol import ConstraintFields, PromptRequest, RequestBody
from radixrt.api.responses import usage_json
from radixrt.api.state import ServerState, constraint_errors_name
from radixrt.base.errors import RequestError
from radixrt.client.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.messages.calls import CompileCall, DetokenizeCall, TokenizeCall
from radixrt.messages.requests import RequestOptions


class TokenizeRequest(PromptRequest, kw_only=True):
    text: str | None = None
    """The same as prompt, which wins."""


class Detokenize(RequestBody, kw_only=True):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool | None = None


class CompileRequest(ConstraintFields, kw_only=True):
    model: str | None = None


def tokenizer_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/tokenize", TokenizeRequest)
    async def tokenize(request: Request, fields: TokenizeRequest) -> Response:
        if fields.prompt is None:
            fields.prompt = fields.text
        prompt, tenant = one_prompt(fields, state, request), caller_of(request).tenant
        call = TokenizeCall(prompt, tenant, fields.cache_salt or "")
        tokenized = await state.client.call(call)
        return json_response(
            {
                "tokens": tokenized.token_ids,
                "count": len(tokenized.token_ids),
                "max_model_len": state.info.context_length,
                "prompt": tokenized.prompt,
            }
        )

    @router.takes("/detokenize", Detokenize)
    async def detokenize(request: Request, fields: Detokenize) -> Response:
        ids = b""
        if fields.tokens:
            ids = token_prompt(fields.tokens, state.info.vocab_size, "tokens").token_ids
        tenant = caller_of(request).tenant
        call = DetokenizeCall(ids, bool(fields.skip_special_tokens), tenant)
        text = await state.client.call(call)
        return json_response({"prompt": text, "text": text})

    @router.takes("/v1/grammar/compile", CompileRequest)
    async def compile_grammar(request: Request, fields: CompileRequest) -> Response:
        constraint = asked_constraint(fields, state.config)
        if constraint.constraint is None:
            raise RequestError(
                "Give a constraint to compile, such as response_format, regex or ebnf."
            )
        with constraint_errors_name(constraint.field):
            call = CompileCall(constraint.constraint, caller_of(request).tenant)
            advice = await while_connected(request, state.client.call(call))
        verdict = msgspec.to_builtins(advice)
        if advice.error is None:
            return json_response(verdict)
        error = RequestError(advice.error.message, param=constraint.field, code="grammar")
        verdict["error"] |= error_body(error)["error"]
        return json_response(verdict, error.status)

    return router


class ScoreRequest(PromptRequest, kw_only=True):
    choices: list[str]
    """The texts; after messages, each is the assistant's message."""
    unconditional: bool | None = None
    """Also score the choices without the prompt."""


def scoring_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/score_choices", ScoreRequest)
    async def score(request: Request, fields: ScoreRequest) -> Response:
        prompt = one_prompt(fields, state, request)
        question = ChoiceQuestion(prompt, fields.choices, bool(fields.unconditional))
        name = request_id("score", fields.rid)
        request.state.request_id = name
        options = request_options(fields, state.config, caller_of(request))
        scores = await while_connected(request, _scores(name, question, options, state))
        return json_response(_as_json(name, scores))

    return router


async def _scores(
    name: str, question: ChoiceQuestion, options: RequestOptions, state: ServerState
) -> ChoiceScores:
    check_answer_count(state.config, len(question.choices) * (2 if question.unconditional else 1))
    return await score_choices(state.client, state.run, name, question, options)


def _as_json(name: str, scores: ChoiceScores) -> dict[str, Any]:
    def numbers(logprobs: list[float] | None) -> list[float | None] | None:
        return None if logprobs is None else [json_logprob(value) for value in logprobs]

    return {
        "id": name,
        "object": "choice_scores",
        "scores": [
            {
                "logprobs": numbers(score.logprobs),
                "unconditional_logprobs": numbers(score.unconditional_logprobs),
            }
            for score in scores.scores
        ],
        "usage": usage_json(
            scores.prompt_tokens, scores.choice_tokens, {"cached_tokens": scores.cached_tokens}
        ),
    }
