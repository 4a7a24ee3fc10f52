"""Answers /health and /ready of an engine that has joined an ingress on another machine, and has no api process."""

import contextlib
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from radixrt.base.channels import Channels
from radixrt.base.liveness.heartbeat import is_well
from radixrt.base.liveness.supervision import start_thread

READ_TIMEOUT_S = 5.0
"""Of a request."""


@contextlib.contextmanager
def answering_probes(listener: socket.socket, channels: Channels) -> Iterator[None]:
    """Answer in threads until the block ends.

    Args:
        listener: listens already; it is closed at the end.
        channels: of the engine.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT_S

        def do_GET(self) -> None:
            status = {"/health": 200, "/ready": 200 if is_joined(channels) else 503}
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


def is_joined(channels: Channels) -> bool:
    """A replica of this engine belongs to an ingress, and none of its processes hangs."""
    return any(replica.joined_file.exists() and is_well(replica) for replica in channels.replicas())
