"""The schedulers behind the tokenizer process: one, or one of each replica here and on other
machines, with the router that chooses between them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import AsyncInbox, Outbox
from radixrt.base.liveness.link import SupervisorLink
from radixrt.joining.fingerprint import model_fingerprint
from radixrt.joining.ingress_end import JoinedEngine, JoinPort
from radixrt.joining.sockets import JoinKeys
from radixrt.messages.answers import EngineInfo
from radixrt.messages.ids import PackedIds
from radixrt.messages.links import ToTokenizerFromScheduler
from radixrt.messages.replicas import (
    Attach,
    EventsReplayed,
    ReplayEvents,
    ReplicaDrained,
    ReplicaReport,
)
from radixrt.messages.replies import CallReply
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.router.router import RoutedPrompt, Router
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars

log = logging.getLogger(__name__)

LAST_MESSAGE_S = 0.05
"""Time in which the last message of a replica that is gone is read; it has arrived."""


class SchedulerLink:
    """The link to one scheduler, and the grammars that it has.

    Args:
        joined: the connection, if the scheduler is on another machine.
    """

    def __init__(
        self,
        channels: Channels,
        supervisor: SupervisorLink,
        joined: JoinedEngine | None = None,
    ) -> None:
        self.channels = channels
        self._supervisor = supervisor
        self._joined = joined
        self.inbox: AsyncInbox[ToTokenizerFromScheduler] | JoinedEngine = joined or AsyncInbox(
            channels.address("scheduler", "tokenizer"), ToTokenizerFromScheduler
        )
        self._outbox = joined or Outbox(channels.address("tokenizer", "scheduler"))
        self._attaching: Outbox | None = None
        if joined is None:
            self._attaching = Outbox(channels.attach_address)
            self._attaching.send(Attach(channels.engine))
        self.grammars = SentGrammars(self.send)
        self.num_sequences = 0
        """Sent."""
        self.num_open = 0
        """Sequences whose answers are not complete."""

    @property
    def replica(self) -> int:
        """Its number; 0 if there are no replicas."""
        return self.channels.replica or 0

    def send(self, message: msgspec.Struct) -> None:
        self.num_sequences += isinstance(message, SequenceRequest)
        self._outbox.send(message)

    async def info(self) -> EngineInfo:
        """Wait until the engine is ready: its first message."""
        while not isinstance(info := await self.inbox.receive(), EngineInfo):
            log.warning("Ignored a %s before the engine was ready.", type(info).__name__)
        return info

    async def wait_until_gone(self) -> None:
        """Wait until the scheduler has ended, or is lost."""
        if self._joined is not None:
            await self._joined.lost.wait()
        else:
            start = self.channels.start
            await self._supervisor.until(lambda status: status.starts.get(self.replica) != start)

    def close(self) -> None:
        self.inbox.close()
        self._outbox.close()
        if self._attaching is not None:
            self._attaching.close()


Absorb = Callable[[SchedulerLink, TokenBatch | CallReply], None]
Lose = Callable[[SchedulerLink, bool], None]
"""Takes the link to a replica that has ended; True: it was told to."""


class Schedulers:
    """The links to all schedulers that live.

    Args:
        channels: of the engine.
    """

    def __init__(
        self, config: ServerConfig, channels: Channels, supervisor: SupervisorLink
    ) -> None:
        self._channels = channels
        self._supervisor = supervisor
        self._num_replicas = config.dp
        """Replicas on this machine."""
        self._is_routed = config.is_routed
        self._port: JoinPort | None = None
        if config.replica_listen is not None:
            keys = JoinKeys.read(config.join_token_file or "")
            model = model_fingerprint(config) if config.dp else ""
            self._port = JoinPort(
                config.replica_listen, keys, channels, supervisor, config.dp, model
            )
        self.links: dict[int, SchedulerLink] = {}
        """Links by replica."""
        if not config.is_routed:
            latest = channels.of_replica(0, supervisor.status.starts.get(0, 0))
            self.links[0] = SchedulerLink(latest, supervisor)
        self._router: Router | None = None
        self._first: EngineInfo | None = None
        self._ready, self._joined = asyncio.Event(), asyncio.Event()
        self._dropped_frames = 0
        """Malformed frames of replicas that have died."""

    @property
    def malformed_frames(self) -> int:
        return self._dropped_frames + sum(
            link.inbox.malformed_frames for link in self.links.values()
        )

    async def info(self) -> EngineInfo:
        """Wait until all schedulers of this machine are ready, or the first that joins, while
        :meth:`serve` runs. In the place of a tokenizer process that has died, one is enough:
        another may be loading its model."""
        await self._ready.wait()
        assert self._first is not None
        return self._first

    async def available(self) -> None:
        """Wait until there is a scheduler to choose."""
        if not self.links:
            await self._joined.wait()

    def choose(self, token_ids: PackedIds, salt: str) -> SchedulerLink:
        """The scheduler for the answers of a request. One must live."""
        if not self._is_routed:
            return self.links[0]
        router = self._router_of_all()
        prompt = RoutedPrompt.from_tokens(token_ids, salt, router.page_size)
        answers = {replica: link.num_open for replica, link in self.links.items()}
        chosen = router.choose(prompt, answers)
        link = self.links[chosen.replica]
        router.send(prompt, chosen, link.num_sequences + 1)
        return link

    def owner(self, token_ids: PackedIds, salt: str) -> SchedulerLink:
        """The scheduler that has most of a prompt cached. One must live."""
        if not self._is_routed:
            return self.links[0]
        router = self._router_of_all()
        return self.links[router.owner(RoutedPrompt.from_tokens(token_ids, salt, router.page_size))]

    async def serve(self, absorb: Absorb, lose: Lose) -> None:
        """Hand on what the schedulers send.

        Args:
            lose: called after the end of a replica.
        """
        if not self._is_routed:
            self._first = await self.links[0].info()
            self._ready.set()
            await self._read(self.links[0], absorb)
        async with asyncio.TaskGroup() as group:
            for replica in range(self._num_replicas):
                group.create_task(self._follow(replica, absorb, lose))
            if self._port is not None:
                group.create_task(
                    self._port.serve(
                        lambda engine: self._serve_link(
                            SchedulerLink(engine.channels, self._supervisor, engine), absorb, lose
                        )
                    )
                )

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        if self._port is not None:
            self._port.close()

    # ------------------------------------------------------------ replicas

    def _router_of_all(self) -> Router:
        assert self._router is not None, "no replica has joined yet"
        return self._router

    async def _follow(self, replica: int, absorb: Absorb, lose: Lose) -> None:
        """Serve one start of a replica after the other."""
        start = -1
        while True:
            status = await self._supervisor.until(
                lambda status, after=start: status.starts.get(replica, -1) > after  # type: ignore[misc]
            )
            start = status.starts[replica]
            channels = self._channels.of_replica(replica, start)
            await self._serve_link(SchedulerLink(channels, self._supervisor), absorb, lose)

    async def _serve_link(self, link: SchedulerLink, absorb: Absorb, lose: Lose) -> None:
        """Serve a replica until its end."""
        reading = asyncio.create_task(self._join(link, absorb))
        leaving = asyncio.create_task(link.wait_until_gone())
        try:
            await asyncio.wait([reading, leaving], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=LAST_MESSAGE_S)
        finally:
            leaving.cancel()
            reading.cancel()
        await asyncio.wait([reading])
        has_drained = not reading.cancelled() and reading.exception() is None
        self._leave(link, lose, has_drained)
        with contextlib.suppress(asyncio.CancelledError):
            await reading  # raises if it has ended by an error

    async def _join(self, link: SchedulerLink, absorb: Absorb) -> bool:
        """Serve a replica until it has drained, which returns True."""
        info = await link.info()
        if self._router is None:
            self._router = Router(info.page_size)
        self._router.join(link.replica)
        self.links[link.replica] = link
        self._joined.set()
        self._first = self._first or info
        if self._port is not None:
            self._port.compare_with(self._first)
        missing = [n for n in range(self._num_replicas) if n not in self.links]
        if self._channels.engine or set(missing) <= {*self._supervisor.status.drained}:
            self._ready.set()
        return await self._read(link, absorb)

    def _leave(self, link: SchedulerLink, lose: Lose, has_drained: bool) -> None:
        self._dropped_frames += link.inbox.malformed_frames
        if self.links.pop(link.replica, None) is not None:
            self._router_of_all().leave(link.replica)
            lose(link, has_drained)
        if not self.links:
            self._joined.clear()
        link.close()

    async def _read(self, link: SchedulerLink, absorb: Absorb) -> bool:
        while True:
            message = await link.inbox.receive()
            match message:
                case TokenBatch() | CallReply():
                    absorb(link, message)
                case ReplicaReport():
                    self._take_report(link, message)
                case EventsReplayed():
                    batches = msgspec.msgpack.decode(message.events, type=list[msgspec.Raw])
                    self._router_of_all().take_events(link.replica, map(bytes, batches))
                case ReplicaDrained():
                    return True
                case EngineInfo():
                    log.warning("Ignored a second EngineInfo.")

    def _take_report(self, link: SchedulerLink, report: ReplicaReport) -> None:
        router = self._router_of_all()
        if report.events:
            router.take_events(link.replica, [report.events])
        router.report(link.replica, report.load)
        missing = router.heartbeat(link.replica, report.stream, report.sequence)
        if missing is not None:
            link.send(ReplayEvents(stream=missing.stream, sequence=missing.sequence))
