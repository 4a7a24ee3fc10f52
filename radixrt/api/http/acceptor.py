"""Accepts connections, a few in each turn of the event loop.

The event loop's own server accepts as long as connections wait: a flood of them would hold every
stream.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 64
"""Connections in one turn, some 0.1 ms of work each."""

HANDSHAKE_TIMEOUT_S = 20.0
"""Longest TLS handshake."""

PAUSE_S = 0.5
"""Pause after an error that time may mend, such as too many open files."""

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts from a listening socket until closed."""

    def __init__(
        self,
        listener: socket.socket,
        config: uvicorn.Config,
        state: ServerState | None = None,
    ) -> None:
        """
        Args:
            config: has been loaded.
            state: of uvicorn's server, which is to know the connections; None: there is none.
        """
        self._listener = listener
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        self._make_protocol = partial(
            make, config=config, server_state=state or ServerState(), app_state={}
        )
        self._tls = config.ssl
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accept no more; accepted connections stay."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def _start(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                log.warning("Cannot accept a connection: %s.", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._start)
                return
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        timeout_s = None if self._tls is None else HANDSHAKE_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # the client has left, or does not speak TLS
            connection.close()


@contextmanager
def accepting(listener: socket.socket, config: uvicorn.Config) -> Iterator[None]:
    """Accept connections for the application of ``config`` until the block ends."""
    config.load()
    acceptor = Acceptor(listener, config)
    try:
        yield
    finally:
        acceptor.close()
