"""``/tokenize``, ``/detokenize`` and ``/v1/grammar/compile``: calls to the tokenizer process
alone."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import error_body
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.requests.constraint import asked_constraint
from radixrt.api.requests.prompts import one_prompt, token_prompt
from radixrt.api.requests.protocol import ConstraintFields, PromptRequest, RequestBody
from radixrt.api.state import ServerState, constraint_errors_name
from radixrt.base.errors import RequestError
from radixrt.messages.calls import CompileCall, DetokenizeCall, TokenizeCall


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
