"""How does the api process run? It waits for the engine, then serves HTTP on an inherited socket."""

import asyncio
import logging
import resource
import socket

import uvicorn
import uvloop

from radixrt.api.app import build_app
from radixrt.api.banner import banner
from radixrt.api.http.connection import IDLE_TIMEOUT_S, Connection
from radixrt.api.state import ServerState
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Channels
from radixrt.client.engine_client import EngineClient

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 1
"""How long connections may go on after a signal to stop; the engine stops at the same time."""

LISTEN_BACKLOG = 2048

MOST_UNREAD_CHUNKS = 4096
"""Of each answer. A client that stops reading fills the socket's buffers first; then these wait."""


def run_api(config: ServerConfig, channels: Channels, listen_socket_fd: int) -> None:
    """Serve until a signal to stop.

    Args:
        listen_socket_fd: a bound TCP socket. It begins to listen when the engine is ready.
    """
    _allow_many_connections()
    uvloop.run(serve(config, channels, socket.socket(fileno=listen_socket_fd)))


async def serve(config: ServerConfig, channels: Channels, listen_socket: socket.socket) -> None:
    debugging = config.log_level == "debug"
    logging.getLogger("uvicorn").setLevel(logging.INFO if debugging else logging.WARNING)
    # Accepted sockets inherit it. Without it, a response waits 40 ms for the client's delayed acknowledgement.
    listen_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = EngineClient(channels, MOST_UNREAD_CHUNKS)
    try:
        state = ServerState(config, client, await client.ready())
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(state),
                http=Connection,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=debugging,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
                timeout_keep_alive=IDLE_TIMEOUT_S,
            )
        )
        listen_socket.listen(LISTEN_BACKLOG)
        print(banner(config, state.info, *listen_socket.getsockname()[:2]), flush=True)
        await server.serve(sockets=[listen_socket])
    except asyncio.CancelledError:
        pass
    finally:
        client.close()


def _allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows: each connection is one, and 1,024 is a common default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
