"""Endpoints about prompts, texts and constraints that give no answer: tokens, scores of choices,
compiled grammars, kept conversations."""

from typing import Any

import msgspec
from fastapi import Response

from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import error_body
from radixrt.api.http.events import json_response
from radixrt.api.http.middleware import new_id
from radixrt.api.logprobs import json_logprob
from radixrt.api.requests.constraint import asked_constraint
from radixrt.api.requests.messages import to_template_messages
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import one_prompt, token_prompt
from radixrt.api.requests.protocol import ConstraintFields, KeepRequest, PromptRequest, RequestBody
from radixrt.api.responses import usage_json
from radixrt.api.state import Context, errors_name
from radixrt.base.errors import RequestError
from radixrt.client.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.messages.calls import CompileCall, DetokenizeCall, TokenizeCall

routes = Endpoints()


class TokenizeRequest(PromptRequest, kw_only=True):
    text: str | None = None
    """The same as prompt, which wins."""


class Detokenize(RequestBody, kw_only=True):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool | None = None


class CompileRequest(ConstraintFields, kw_only=True):
    model: str | None = None


class ScoreRequest(PromptRequest, kw_only=True):
    choices: list[str]
    """The texts; after messages, each is the assistant's message."""
    unconditional: bool | None = None
    """Also score the choices without the prompt."""


@routes.takes("/tokenize", TokenizeRequest)
async def tokenize(fields: TokenizeRequest, context: Context) -> Response:
    if fields.prompt is None:
        fields.prompt = fields.text
    prompt = one_prompt(fields, context)
    call = TokenizeCall(prompt, context.tenant, context.root(fields.cache_salt))
    tokenized = await context.call(call)
    return json_response(
        {
            "tokens": tokenized.token_ids,
            "count": len(tokenized.token_ids),
            "max_model_len": context.state.info.context_length,
            "prompt": tokenized.prompt,
        }
    )


@routes.takes("/detokenize", Detokenize)
async def detokenize(fields: Detokenize, context: Context) -> Response:
    ids = b""
    if fields.tokens:
        ids = token_prompt(fields.tokens, context.state.info.vocab_size, "tokens").token_ids
    call = DetokenizeCall(ids, bool(fields.skip_special_tokens), context.tenant)
    text = await context.call(call)
    return json_response({"prompt": text, "text": text})


@routes.takes("/v1/grammar/compile", CompileRequest)
async def compile_grammar(fields: CompileRequest, context: Context) -> Response:
    constraint, field = asked_constraint(fields, context.state.config)
    if constraint is None:
        raise RequestError("Give a constraint to compile, such as response_format, regex or ebnf.")
    with errors_name(field, "structured"):
        advice = await context.wait(context.call(CompileCall(constraint, context.tenant)))
    verdict = msgspec.to_builtins(advice)
    if advice.error is None:
        return json_response(verdict)
    error = RequestError(advice.error.message, param=field, code="grammar")
    verdict["error"] |= error_body(error)["error"]
    return json_response(verdict, error.status)


@routes.takes("/score_choices", ScoreRequest)
async def score(fields: ScoreRequest, context: Context) -> Response:
    """Log-probabilities of several texts behind one prompt, which is computed once."""
    state, prompt = context.state, one_prompt(fields, context)
    question = ChoiceQuestion(prompt, fields.choices, bool(fields.unconditional))
    name = context.name(request_id("score", fields.rid))
    options = request_options(fields, context)
    check_answer_count(state.config, len(fields.choices) * (2 if question.unconditional else 1))
    scoring = score_choices(state.client, state.run, name, question, options)
    return json_response(_scores_json(name, await context.wait(scoring)))


def _scores_json(name: str, scores: ChoiceScores) -> dict[str, Any]:
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


@routes.takes("/v1/conversations", KeepRequest)
async def keep(fields: KeepRequest, context: Context) -> Response:
    """Keep a prompt that many requests will begin with."""
    continuation = Continuation.find_one_prompt(fields, context)
    items = (
        fields.prompt or "" if fields.messages is None else to_template_messages(fields.messages)
    )
    name = new_id("conv")
    kept = continuation.keep(name, items, continuation.taken)
    return json_response({"id": name, "kept": kept, "length": continuation.taken + len(items)})
