"""``/v1/replicas/…``: lets a replica of ``--dp`` go, and starts it again."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.protocol import RequestBody
from radixrt.api.state import ServerState


class ReplicaRequest(RequestBody, kw_only=True):
    """Names a replica."""

    replica: Annotated[int, msgspec.Meta(ge=0)]


def replica_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/replicas/drain", ReplicaRequest)
    async def drain(request: Request, fields: ReplicaRequest) -> Response:
        await state.client.drain_replica(fields.replica)
        return json_response({"replica": fields.replica, "state": "drained"})

    @router.takes("/v1/replicas/start", ReplicaRequest)
    async def start(request: Request, fields: ReplicaRequest) -> Response:
        state.client.start_replica(fields.replica)
        return json_response({"replica": fields.replica, "state": "started"})

    return router
