"""``/v1/replicas/…``: lets a replica of ``--dp`` go, and starts it again."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.protocol import RequestBody
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.calls import DrainReplicaCall


class ReplicaRequest(RequestBody, kw_only=True):
    """Names a replica."""

    replica: Annotated[int, msgspec.Meta(ge=0)]


def replica_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/replicas/drain", ReplicaRequest)
    async def drain(request: Request, fields: ReplicaRequest) -> Response:
        _check_replicas(state)
        await state.client.call(DrainReplicaCall(fields.replica))
        return json_response({"replica": fields.replica, "state": "drained"})

    @router.takes("/v1/replicas/start", ReplicaRequest)
    async def start(request: Request, fields: ReplicaRequest) -> Response:
        _check_replicas(state)
        state.client.start_replica(fields.replica)
        return json_response({"replica": fields.replica, "state": "started"})

    return router


def _check_replicas(state: ServerState) -> None:
    """Raises:
    RequestError: there is one engine, which no request may end.
    """
    if state.info.replicas == 1:
        raise RequestError("This server has no replicas: --dp is 1.", status=404)
