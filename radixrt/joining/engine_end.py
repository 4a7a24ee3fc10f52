"""The engine's end of the link to an ingress, in place of the link to a tokenizer process on the
same machine."""

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from radixrt import __version__
from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Decoder, Poller, encode
from radixrt.base.liveness.link import EnginesJoined, SupervisorLink
from radixrt.joining.sockets import JoinKeys, engine_socket
from radixrt.messages.answers import EngineInfo
from radixrt.messages.links import ToJoinedEngine, ToScheduler
from radixrt.messages.replicas import Join, JoinAgain, Joined, JoinRefused, Ping

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Longest time without a message of the ingress, which sends four a second. After it, the engine
joins anew."""


WARNING_PAUSE_S = 60.0
"""Between two warnings that no ingress answers."""


class IngressLink(Decoder[ToJoinedEngine]):
    """Joins an ingress, and joins it again whenever the connection is lost.

    Each attempt has a connection of its own, so that no message of one reaches the next.

    Args:
        model: fingerprint of the model that the engine serves.
        poller: waits for messages of the ingress, too.
        forget: called when an ingress is lost: its sequences go on elsewhere.
        supervisor: is told whether this engine has joined.
    """

    def __init__(
        self,
        config: ServerConfig,
        channels: Channels,
        model: str,
        poller: Poller,
        forget: Callable[[], None],
        supervisor: SupervisorLink,
    ) -> None:
        super().__init__(ToJoinedEngine)
        assert config.join is not None and config.join_token_file is not None
        self._address = config.join
        self._keys = JoinKeys.read(config.join_token_file)
        self._channels = channels
        self._model = model
        self._poller = poller
        self._forget = forget
        self._supervisor = supervisor
        self._encoder = msgspec.msgpack.Encoder()
        self._join: Join | None = None
        self._socket: zmq.Socket | None = None
        self._is_joined = False
        self._retry_at = 0.0
        """Time of ``time.monotonic()`` at which the next attempt begins, if the ingress stays
        silent."""
        self._was_answered = False
        """In this attempt."""
        self._warn_at = 0.0

    def note(self, info: EngineInfo) -> None:
        """As of :class:`TokenizerLink`; an engine that joins has no adapters."""

    def join(self, info: EngineInfo) -> None:
        """Join the ingress, as soon as it answers."""
        self._join = Join(version=__version__, model=self._model, info=info)
        log.info("Joins the ingress at %s.", self._address)
        self._connect()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the ingress. One that no ingress waits for is dropped."""
        if self._is_joined:
            self._send(message)

    def receive_waiting(self) -> list[ToScheduler]:
        """All messages for the scheduler that have arrived, without waiting. Call it at least once
        a second."""
        received: list[ToScheduler] = []
        while (frame := self._next_frame()) is not None:
            self._retry_at = max(self._retry_at, time.monotonic() + SILENCE_S)
            match message := self.decode(frame):
                case None | Ping():
                    pass
                case Joined():
                    self._begin(message)
                case JoinRefused():
                    log.warning("The ingress does not take this engine in: %s", message.reason)
                    self._retry_at = time.monotonic() + message.retry_after_s
                    self._was_answered = True
                case JoinAgain():
                    received.clear()
                    self._connect()
                case _ if self._is_joined:
                    received.append(message)
        if self._join is not None and time.monotonic() > self._retry_at:
            received.clear()
            if not self._was_answered:
                self._warn()
            self._connect()
        return received

    def _warn(self) -> None:
        if time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + WARNING_PAUSE_S
            log.warning(
                "The ingress at %s does not answer. If it runs: do --join and --join-token-file fit it?",
                self._address,
            )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> None:
        """Begin a new attempt."""
        if self._is_joined:
            log.warning("The ingress is lost; its sequences are dropped.")
            self._is_joined = False
            self._supervisor.tell(EnginesJoined(0))
            self._forget()
        if self._socket is not None:
            self._poller.remove(self._socket)
            self._socket.close()
        self._socket = engine_socket(self._address, self._keys)
        self._poller.add(self._socket)
        self._retry_at = time.monotonic() + SILENCE_S
        self._was_answered = False
        assert self._join is not None
        self._send(self._join)

    def _begin(self, message: Joined) -> None:
        """The ingress has taken this engine in.

        Raises:
            RuntimeError: its tokenizer is another than that of an ingress before, which the workers
                have loaded.
        """
        file = self._channels.tokenizer_file
        if file.exists() and file.read_bytes() != message.tokenizer_json:
            file.unlink()
            raise RuntimeError("The ingress has another tokenizer now, so the engine starts again.")
        written = self._channels.folder / "tokenizer.json"
        written.write_bytes(message.tokenizer_json)
        written.replace(file)  # replicas of one machine may write it at the same time
        self._is_joined = True
        self._supervisor.tell(EnginesJoined(1))
        log.info("Joined the ingress at %s as replica %d.", self._address, message.replica)

    def _send(self, message: msgspec.Struct) -> None:
        assert self._socket is not None
        self._socket.send(encode(self._encoder, message), zmq.NOBLOCK, copy=False)

    def _next_frame(self) -> bytes | None:
        if self._socket is None:
            return None
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
