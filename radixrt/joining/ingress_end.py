"""The port of an ingress at which engines on other machines join.

A joined engine looks to the rest of the ingress like a replica on its own machine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from radixrt import __version__
from radixrt.base.channels import Channels
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Decoder, encode
from radixrt.base.liveness.link import EnginesJoined, SupervisorLink
from radixrt.base.settings.replicas import MAX_REPLICAS
from radixrt.joining.sockets import ZAP_DOMAIN, JoinKeys, ingress_socket
from radixrt.messages.answers import EngineInfo
from radixrt.messages.links import ToTokenizerFromScheduler
from radixrt.messages.replicas import Join, JoinAgain, Joined, JoinRefused, Ping

log = logging.getLogger(__name__)

PING_S = 0.25
"""Between two signs of life to each engine, which answers with a report."""

SILENCE_S = 5.0
"""An engine that sends nothing for this time is lost. One whose connection ends is lost at once."""

REFUSED_PAUSE_S = 30.0
"""After which a refused engine may ask again: the ingress may have been started again with other
settings."""

MAY_DIFFER = ("kv_pool_tokens", "device", "attention_backend", "weight_bytes")
"""Facts about engines of one server that need not be equal."""


class JoinedEngine(Decoder[ToTokenizerFromScheduler]):
    """The two channels of a joined engine."""

    def __init__(self, channels: Channels, send: Callable[[bytes], bool]) -> None:
        """
        Args:
            channels: those of a replica on this machine, as which the engine counts.
            send: hands a frame to its connection; False if that has ended.
        """
        super().__init__(ToTokenizerFromScheduler)
        self.channels = channels
        self.send_frame = send
        self.heard_at = time.monotonic()
        self.lost = asyncio.Event()
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()

    def take(self, frame: bytes) -> None:
        """Keep a frame until it is received."""
        self.heard_at = time.monotonic()
        self._frames.put_nowait(frame)

    async def receive(self) -> ToTokenizerFromScheduler:
        """Wait for the next well-formed message."""
        while (message := self.decode(await self._frames.get())) is None:
            pass
        return message

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting. A message to an engine that is gone is dropped.

        Raises:
            FrameTooLargeError: the message exceeds the receiver's limit.
        """
        self.send_frame(encode(self._encoder, message))

    def close(self) -> None:
        """Forget the engine; its requests go on elsewhere."""
        self.lost.set()


@dataclass(frozen=True)
class _KnownKey:
    """Lets the holders of one key in; called by the handler of ZAP."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class JoinPort:
    """Takes engines in.

    Args:
        channels: of the ingress's engine.
        supervisor: is told how many engines have joined.
        num_local: replicas on this machine, whose numbers come first.
        model: fingerprint of what they serve; empty: there are none, so the first engine that joins
            sets the model.
    """

    def __init__(
        self,
        address: str,
        keys: JoinKeys,
        channels: Channels,
        supervisor: SupervisorLink,
        num_local: int = 0,
        model: str = "",
    ) -> None:
        """Raises ConfigError if the address cannot be bound."""
        self._channels = channels
        self._supervisor = supervisor
        self._keys = keys
        self._num_local = num_local
        self._free = set(range(num_local, MAX_REPLICAS))
        self._num_joined = 0
        self._engines: dict[bytes, JoinedEngine] = {}
        """By the identity of the connection."""
        self._model = model
        self._info: EngineInfo | None = None
        """Of the first engine."""
        self._decoder: Decoder[Join | ToTokenizerFromScheduler] = Decoder(
            Join | ToTokenizerFromScheduler
        )
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._socket = ingress_socket(address, keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"--replica-listen {address}: cannot listen ({error}).") from None
        log.info("Engines can join at %s.", self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def compare_with(self, info: EngineInfo) -> None:
        """Let in only engines like one of this machine."""
        self._info = self._info or info

    async def serve(self, follow: Callable[[JoinedEngine], Awaitable[None]]) -> None:
        """Take engines in until cancelled.

        Args:
            follow: serves an engine until it is lost.
        """
        authenticator = AsyncioAuthenticator(zmq.asyncio.Context.instance())
        authenticator.configure_curve_callback(
            ZAP_DOMAIN.decode(), _KnownKey(self._keys.engine.public)
        )
        authenticator.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look())
                while True:
                    identity, *frames = await self._socket.recv_multipart()
                    if len(frames) == 1 and (engine := self._take(identity, frames[0])):
                        group.create_task(self._follow(engine, follow))
        finally:
            authenticator.stop()

    def close(self) -> None:
        self._socket.close()

    def _take(self, identity: bytes, frame: bytes) -> JoinedEngine | None:
        """Take a frame; returns an engine that joins by it."""
        if (engine := self._engines.get(identity)) is not None:
            engine.take(frame)
            return None
        message = self._decoder.decode(frame)
        if not isinstance(message, Join):
            if message is not None:  # of an engine that was lost
                self._send(identity, self._encoder.encode(JoinAgain()))
            return None
        if self._info is None and self._num_local:
            self._refuse(identity, "it has not started its own replicas yet.", PING_S)
            return None
        if reason := self._refusal(message):
            log.warning("Refused an engine: %s", reason)
            self._refuse(identity, reason, REFUSED_PAUSE_S)
            return None
        return self._welcome(identity, message)

    def _welcome(self, identity: bytes, join: Join) -> JoinedEngine:
        self._model, self._info = join.model, self._info or join.info
        replica = min(self._free)
        self._free.remove(replica)
        channels = self._channels.of_replica(replica, self._num_joined)
        self._num_joined += 1
        engine = JoinedEngine(channels, lambda frame: self._send(identity, frame))
        self._set_engines({**self._engines, identity: engine})
        engine.send(Joined(replica, self._channels.tokenizer_file.read_bytes()))
        engine.take(self._encoder.encode(join.info))
        return engine

    def _set_engines(self, engines: dict[bytes, JoinedEngine]) -> None:
        self._engines = engines
        self._supervisor.tell(EnginesJoined(len(engines)))

    def _refuse(self, identity: bytes, reason: str, retry_after_s: float) -> None:
        refused = JoinRefused(reason=reason, retry_after_s=retry_after_s)
        self._send(identity, self._encoder.encode(refused))

    def _refusal(self, join: Join) -> str:
        """The reason for which an engine cannot be one of this server's; "": it can."""
        if join.version != __version__:
            return f"it is radixrt {join.version}, the ingress is {__version__}."
        if not self._free:
            return f"{MAX_REPLICAS} replicas are the most."
        if join.model != (self._model or join.model):
            return "its checkpoint, or the type of its weights, is another than that of the first engine."
        if self._info is None:
            return ""
        ours, theirs = (
            {name: getattr(info, name) for name in EngineInfo.__struct_fields__}
            for info in (self._info, join.info)
        )
        differing = [n for n in ours if n not in MAY_DIFFER and ours[n] != theirs[n]]
        return f"it differs from the first engine in {', '.join(differing)}." if differing else ""

    async def _follow(
        self, engine: JoinedEngine, follow: Callable[[JoinedEngine], Awaitable[None]]
    ) -> None:
        try:
            await follow(engine)
        except Exception:
            log.exception("Replica %s is dropped.", engine.channels.replica)
        finally:
            engine.close()
            self._set_engines(
                {i: other for i, other in self._engines.items() if other is not engine}
            )
            self._free.add(engine.channels.replica or 0)

    async def _look(self) -> None:
        """Give signs of life, and find the engines that are gone."""
        ping = self._encoder.encode(Ping())
        while True:
            for identity, engine in list(self._engines.items()):
                silence_s = time.monotonic() - engine.heard_at
                if not engine.send_frame(ping) or silence_s > SILENCE_S:
                    self._set_engines({i: e for i, e in self._engines.items() if i != identity})
                    engine.close()
            await asyncio.sleep(PING_S)

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """False: the connection has ended."""
        sent = cast("asyncio.Future[None]", self._socket.send_multipart([identity, frame]))
        return not (sent.done() and sent.exception() is not None)
