"""Runs the api process: waits for the engine, then serves HTTP on an inherited socket."""

import asyncio
import logging
import socket

import uvicorn
import uvloop

from radixrt.api.app import build_app
from radixrt.api.banner import banner
from radixrt.api.state import ServerState
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Channels
from radixrt.client.engine_client import EngineClient

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep idle connections (httpx and so the openai client 5 s, cloud load balancers 60 s): the side
that sends requests must close first, or a request may meet a connection that was just closed."""

SHUTDOWN_GRACE_S = 1
"""How long open connections last after a signal to stop, in seconds; the engine stops at the same time."""

LISTEN_BACKLOG = 2048

MOST_UNREAD_CHUNKS = 4096
"""Most chunks of each answer that wait for a client that has stopped reading, beyond the socket's buffers."""


def run_api(config: ServerConfig, channels: Channels, listen_socket_fd: int) -> None:
    """Serve until a signal to stop.

    Args:
        listen_socket_fd: a bound TCP socket. It begins to listen when the engine is ready.
    """
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
                http="httptools",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=debugging,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        listen_socket.listen(LISTEN_BACKLOG)
        print(banner(config, state.info, *listen_socket.getsockname()[:2]), flush=True)
        await server.serve(sockets=[listen_socket])
    except asyncio.CancelledError:
        pass
    finally:
        client.close()
