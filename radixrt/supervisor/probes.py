"""Answers /health and /ready of an engine that has joined an ingress on another machine, and has no
api process."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from radixrt.base.liveness.supervision import start_thread

READ_TIMEOUT_S = 5.0
"""Of a request."""


@contextlib.contextmanager
def answering_probes(listener: socket.socket, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Answer in threads until the block ends.

    Args:
        listener: listens already; it is closed at the end.
        is_ready: whether a replica of the engine belongs to an ingress, and none of its processes
            hangs.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT_S

        def do_GET(self) -> None:
            status = {"/health": 200, "/ready": 200 if is_ready() else 503}
            self.send_response(status.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    start_thread(server.serve_forever, name="probes")
    try:
        yield
    finally:
        server.shutdown()
