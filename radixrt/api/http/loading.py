"""Answers requests while the first engine starts: 503 with the reason, in the form of the path."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from radixrt.api.http.acceptor import Acceptor, protocols_of
from radixrt.api.http.errors import ErrorShape, shape_of
from radixrt.api.http.events import json_response
from radixrt.api.http.gate import RETRY_AFTER_S
from radixrt.base.errors import RequestError

_ERROR = RequestError("The server is loading its model.", status=503)


class Loading:
    """The ASGI application of a server that loads its model."""

    def __init__(self, shapes: Sequence[ErrorShape]) -> None:
        """
        Args:
            shapes: of the paths whose errors are not in OpenAI's form.
        """
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = json_response(shape_of(scope["path"], self._shapes).body(_ERROR), _ERROR.status)
        response.headers["retry-after"] = str(RETRY_AFTER_S)
        response.headers["connection"] = "close"  # the next request is for the whole application
        await response(scope, receive, send)


@contextlib.contextmanager
def accepting(listener: socket.socket, config: uvicorn.Config) -> Iterator[None]:
    """Accept connections for the application of ``config`` until the block ends."""
    config.load()
    acceptor = Acceptor(listener, protocols_of(config, ServerState()), config.ssl)
    try:
        yield
    finally:
        acceptor.close()
