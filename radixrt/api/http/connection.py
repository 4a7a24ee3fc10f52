"""One HTTP connection: bounds the size of headers and the times that a client takes to send a
request and to read the answer.

uvicorn's protocol bounds none. It collects a header for as long as bytes come, before any
authentication, and a connection that sends nothing stays open for ever. nginx's limits
(``large_client_header_buffers``, ``client_header_timeout``, ``client_body_timeout``) and Apache's
``RequestReadTimeout`` are the models.
"""

import asyncio
import enum
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote

import uvicorn
from prometheus_client import Counter
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from radixrt.api.http.errors import shape_of
from radixrt.api.http.events import json_response
from radixrt.api.http.gate import Throttles
from radixrt.base.errors import RequestError

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
"""Request line and headers together; more get 431."""

IDLE_TIMEOUT_S = 75
"""Seconds without a request after which a connection is closed. Longer than clients and proxies
keep idle connections (httpx and so the openai client 5 s, cloud load balancers 60 s): the side that
closes first must be the side that sends requests, or a request that is just being sent meets a
closed connection."""

HEADER_TIMEOUT_S = 20.0
"""Seconds from the first byte of a request to the end of its headers."""

BODY_TIMEOUT_S = 20.0
"""Seconds from the end of the headers to the end of the body, plus one for each
``BODY_BYTES_PER_S`` received."""

BODY_BYTES_PER_S = 500
"""The slowest link that is served: Apache's default."""

READ_TIMEOUT_S = 30.0
"""Seconds in which a client that lets its buffers fill up must read at ``BODY_BYTES_PER_S``, or it
is cut off."""

SEND_BUFFER_BYTES = 256 * 1024
"""The system's buffer for each connection; it grows to some megabytes otherwise."""

_FEED_BYTES = 16 * 1024
"""The parser is fed in pieces of this size, so that the headers' size is known to within one."""


_PROBES = (b"GET /health ", b"GET /ready ", b"GET /metrics ", b"GET /ping ", b"HEAD /health ")
"""Beginnings of requests that do not wait for their turn."""


class _Reading(enum.Enum):
    """The part of a request that is being read."""

    NOTHING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits: 431 for large headers, 408 for slow requests."""

    def __init__(
        self,
        *args: Any,
        throttles: Throttles,
        slow_readers: Counter,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            slow_readers: counts the connections that are cut off.
        """
        super().__init__(*args, **kwargs)
        self._throttles = throttles
        self._slow_readers = slow_readers
        self._unread: asyncio.TimerHandle | None = None
        """Runs while the client does not read."""
        self._reading = _Reading.NOTHING
        self._header_bytes = 0
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._is_waiting = False
        """Received bytes wait for their turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_unread()
        if self.cycle is None or self.cycle.response_complete:
            super().connection_lost(exc)
        else:  # ends the work of a request
            self.cycle.disconnected = True  # from now on, nothing is written
            self._throttles.starts.run(partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if self._reading is not _Reading.NOTHING or data.startswith(_PROBES):
            self._read(data)
        elif not self._throttles.reads.run(partial(self._read_later, data)):
            self.transport.pause_reading()
            self._is_waiting = True

    def _read_later(self, data: bytes) -> None:
        if self._is_waiting:
            self._is_waiting = False
            if self.transport.is_closing():
                return
            self.transport.resume_reading()
        self._read(data)

    def _read(self, data: bytes) -> None:
        for begin in range(0, len(data), _FEED_BYTES):
            piece = data[begin : begin + _FEED_BYTES]
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._reading is _Reading.HEADERS:
                self._header_bytes += len(piece)
                if self._header_bytes > MAX_HEADER_BYTES + _FEED_BYTES:
                    self._refuse(_headers_too_large())
                    return
        if self._reading is _Reading.NOTHING:
            if self.cycle is None or self.cycle.response_complete:
                self._close_if_idle()  # blank lines before a request keep no connection open
        elif self._deadline is None:
            limit_s = HEADER_TIMEOUT_S if self._reading is _Reading.HEADERS else BODY_TIMEOUT_S
            self._deadline = self.loop.call_later(limit_s, self._too_slow, self._body_bytes)

    def pause_writing(self) -> None:
        """The client does not read: its socket's buffers and the transport's are full."""
        super().pause_writing()
        self._unread = self.loop.call_later(
            READ_TIMEOUT_S, self._reads_too_slowly, self.transport.get_write_buffer_size()
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    # ------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._header_bytes, self._body_bytes = _Reading.HEADERS, 0, 0

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        self._reading = _Reading.BODY
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size <= MAX_HEADER_BYTES:
            super().on_headers_complete()
            return
        app, self.app = self.app, self._refusal(_headers_too_large())
        super().on_headers_complete()
        self.app = app

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_deadline()
        self._reading = _Reading.NOTHING
        super().on_message_complete()

    # ------------------------------------------------------------ limits

    def _close_if_idle(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.timeout_keep_alive_task = self.loop.call_later(
            IDLE_TIMEOUT_S, self.timeout_keep_alive_handler
        )

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _reads_too_slowly(self, unread_before: int) -> None:
        """Cut the connection, unless the client has read at the speed of a slow link. Nothing is
        written meanwhile."""
        unread = self.transport.get_write_buffer_size()
        if unread_before - unread < READ_TIMEOUT_S * BODY_BYTES_PER_S:
            self._slow_readers.inc()
            self.transport.abort()
            return
        self._unread = self.loop.call_later(READ_TIMEOUT_S, self._reads_too_slowly, unread)

    def _too_slow(self, body_bytes_before: int) -> None:
        self._deadline = None
        received = self._body_bytes - body_bytes_before
        if self._reading is _Reading.BODY and (received or self.flow.read_paused):
            # The time that these bytes buy. A body that the server does not read is not the
            # client's delay.
            more_s = max(received / BODY_BYTES_PER_S, 1.0)
            self._deadline = self.loop.call_later(
                min(more_s, BODY_TIMEOUT_S), self._too_slow, self._body_bytes
            )
            return
        part = "headers" if self._reading is _Reading.HEADERS else "body"
        self._refuse(
            RequestError(
                f"The request's {part} came too slowly; send it without pauses.", status=408
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer at once, unless an answer is being sent already, and close the connection."""
        if not self._is_answered() and not self.transport.is_closing():
            response = self._refusal(error)
            head = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}".encode()]
            head += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()

    def _refusal(self, error: RequestError) -> Response:
        """The response in the form of the path, as far as it is known."""
        body = shape_of(unquote(self.url.decode("latin-1"))).body(error)
        response = json_response(body, error.status)
        response.headers["connection"] = "close"
        return response

    def _is_answered(self) -> bool:
        """An answer to the request that is being read, or to the one before it, has begun."""
        if self.cycle is None:
            return False
        if self._reading is _Reading.BODY:
            return bool(self.cycle.response_started)
        return not self.cycle.response_complete


_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


def _headers_too_large() -> RequestError:
    return RequestError(
        f"The request line and headers are larger than {MAX_HEADER_BYTES} bytes.", status=431
    )


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
