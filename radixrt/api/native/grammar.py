"""``/v1/grammar/compile``: can an answer be held to this, by what, and how long does it take to get ready?"""

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.openai.constraint import asked_constraint, constraint_field
from radixrt.api.openai.protocol import ConstraintFields
from radixrt.api.state import ServerState, constraint_errors_name
from radixrt.base.errors import RequestError


class CompileRequest(ConstraintFields, kw_only=True):
    model: str | None = None


def grammar_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/grammar/compile", CompileRequest)
    async def compile_grammar(request: Request, fields: CompileRequest) -> Response:
        structured = asked_constraint(fields, state.config)
        if structured is None:
            raise RequestError(
                "Give a constraint to compile, such as response_format, regex or ebnf."
            )
        with constraint_errors_name(constraint_field(fields)):
            report = await while_connected(request, state.client.compile(structured))
        return json_response(msgspec.to_builtins(report))

    return router
