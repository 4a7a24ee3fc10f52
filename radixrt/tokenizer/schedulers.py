"""The schedulers behind the tokenizer process: one, or one of each replica here and on other
machines, with the router that chooses between them."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.ipc import AsyncInbox, Outbox
from radixrt.base.liveness.link import SupervisorLink
from radixrt.joining.fingerprint import model_fingerprint
from radixrt.joining.ingress_end import JoinedEngine, JoinPort
from radixrt.joining.sockets import JoinKeys
from radixrt.messages.answers import EngineInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import (
    AnySchedulerCall,
    CallReply,
    DrainReplicaCall,
    PinCall,
    ReleaseCacheCall,
)
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds
from radixrt.messages.links import ToTokenizerFromScheduler
from radixrt.messages.replicas import (
    Attach,
    EventsReplayed,
    ReplayEvents,
    ReplicaDrained,
    ReplicaReport,
)
from radixrt.messages.requests import GenerateRequest
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.router.router import RoutedPrompt, Router
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars
from radixrt.tokenizer.images.sent_images import SentImages

log = logging.getLogger(__name__)

LAST_MESSAGE_S = 0.05
"""Time in which the last message of a replica that is gone is read; it has arrived."""

MAX_HOMES = 4096
"""Requests whose replicas are remembered, so that equal ones find their answers there."""


class SchedulerLink:
    """The link to one scheduler, and the grammars and images that it has.

    Args:
        joined: the connection, if the scheduler is on another machine.
    """

    def __init__(
        self, channels: Channels, supervisor: SupervisorLink, joined: JoinedEngine | None = None
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
        self.images = SentImages(self.send, by_file=joined is None)
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


Absorb = Callable[[TokenBatch], None]
Lose = Callable[[SchedulerLink, list[str], bool], None]
"""Takes the link to a replica that has ended, and its leases; True: it was told to end."""


class Schedulers:
    """The links to all schedulers that live.

    Attributes:
        calls: the calls to them.
    """

    def __init__(
        self, config: ServerConfig, channels: Channels, supervisor: SupervisorLink
    ) -> None:
        self._channels = channels
        self._supervisor = supervisor
        self._num_replicas = config.dp
        """Replicas on this machine."""
        self._is_routed = config.is_routed
        self.calls = ReplicaCalls(self, config.max_replicas, config.is_routed)
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
        self._homes: OrderedDict[bytes | None, int] = OrderedDict()
        """The replicas of the last requests that share their answers, by digest."""
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

    def choose(
        self, token_ids: PackedIds, root: CacheRoot, shared_by: object = None
    ) -> SchedulerLink:
        """The scheduler for the answers of a request. One must live.

        Args:
            shared_by: see :func:`shared_by`: requests that share an answer go to one replica.
        """
        if not self._is_routed:
            return self.links[0]
        router = self._router_of_all()
        prompt = RoutedPrompt.from_tokens(token_ids, root, router.page_size)
        answers = {replica: link.num_open for replica, link in self.links.items()}
        key = None
        if shared_by is not None:
            parts = msgspec.msgpack.encode((token_ids, root, shared_by))
            key = hashlib.blake2b(parts, digest_size=16).digest()
        chosen = router.choose(prompt, answers, self._homes.pop(key, None))
        if key is not None:
            self._homes[key] = chosen.replica
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)
        link = self.links[chosen.replica]
        router.send(prompt, chosen, link.num_sequences + 1)
        return link

    def owner(self, token_ids: PackedIds, root: CacheRoot) -> SchedulerLink:
        """The scheduler that has most of a prompt cached. One must live."""
        if not self._is_routed:
            return self.links[0]
        router = self._router_of_all()
        return self.links[router.owner(RoutedPrompt.from_tokens(token_ids, root, router.page_size))]

    async def serve(self, absorb: Absorb, lose: Lose) -> None:
        """Hand on what the schedulers send.

        Args:
            lose: called after the end of a replica.
        """
        if not self._is_routed:
            self._first = await self.links[0].info()
            self._ready.set()
            await self._read(self.links[0], absorb)

        async def serve_joined(engine: JoinedEngine) -> None:
            link = SchedulerLink(engine.channels, self._supervisor, engine)
            await self._serve_link(link, absorb, lose)

        async with asyncio.TaskGroup() as group:
            for replica in range(self._num_replicas):
                group.create_task(self._follow(replica, absorb, lose))
            if self._port is not None:
                group.create_task(self._port.serve(serve_joined))

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
        self._router.join(link.replica, has_states=info.kept_states > 0)
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
            lose(link, self.calls.lose(link), has_drained)
        if not self.links:
            self._joined.clear()
        link.close()

    async def _read(self, link: SchedulerLink, absorb: Absorb) -> bool:
        while True:
            message = await link.inbox.receive()
            match message:
                case TokenBatch():
                    absorb(message)
                case CallReply():
                    self.calls.absorb(link, message)
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


_Order = tuple[SchedulerLink, AnySchedulerCall]
"""A call for one replica."""


@dataclass(eq=False)
class _Open:
    """A call without replies of all replicas that have it."""

    call: AnySchedulerCall
    waiting: set[SchedulerLink]
    values: dict[int, Any] = field(default_factory=dict)
    """The values of replies, as builtins, by replica."""
    errors: list[RequestError] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self, link: SchedulerLink) -> None:
        """Do not wait for a replica any more."""
        self.waiting.discard(link)
        if not self.waiting:
            self.complete.set()


class ReplicaCalls:
    """The calls to the schedulers.

    Args:
        num_replicas: the most that may live at a time.
        is_routed: False: there is one scheduler, whose replies are handed on as they are.
    """

    def __init__(self, schedulers: Schedulers, num_replicas: int, is_routed: bool) -> None:
        self._schedulers = schedulers
        self._is_routed = is_routed
        self.num_replicas = num_replicas
        self._open: dict[int, _Open] = {}
        self._ids = itertools.count()
        self._leases: dict[str, tuple[int, float]] = {}
        """Replica of each lease, and the time at which it expires."""

    async def ask(self, call: AnySchedulerCall) -> Any:
        """Send a call to the replicas that it concerns; returns the value of the merged reply, as
        builtins.

        Raises:
            RequestError: the reply is an error, or there is no such replica.
        """
        orders = self._orders(call)
        if isinstance(call, DrainReplicaCall):
            self._check_drain(call, orders)
        call_id = next(self._ids)
        opened = self._open[call_id] = _Open(call, {link for link, _ in orders})
        try:
            for link, order in orders:
                link.send(replace(order, call_id=call_id))
            if orders:
                await opened.complete.wait()
        finally:
            del self._open[call_id]
        if opened.errors and (call.needs_all or not opened.values):
            raise opened.errors[0]
        if not opened.values:
            raise RequestError(
                "The replica was restarted before it answered; ask again.",
                status=503,
                retry_after_s=2,
            )
        if not self._is_routed:
            return opened.values[0]
        return call.merge(opened.values, self.num_replicas)

    def owner(self, token_ids: PackedIds, root: CacheRoot) -> int:
        """The replica that has most of a prompt cached."""
        return self._schedulers.owner(token_ids, root).replica

    def absorb(self, link: SchedulerLink, reply: CallReply) -> None:
        """Take the reply of one replica."""
        opened = self._open.get(reply.call_id)
        if opened is None:
            return
        if reply.error is not None:
            opened.errors.append(reply.error.as_error())
        else:
            opened.values[link.replica] = reply.value
            self._note_lease(opened.call, link, reply.value)
        opened.leave(link)

    def lose(self, link: SchedulerLink) -> list[str]:
        """A replica has ended: do not wait for its replies; returns its leases."""
        for opened in self._open.values():
            opened.leave(link)
        now = time.monotonic()
        lost = [lease for lease, (replica, _) in self._leases.items() if replica == link.replica]
        return [lease for lease in lost if self._leases.pop(lease)[1] > now]

    def _check_drain(self, call: DrainReplicaCall, orders: list[_Order]) -> None:
        """Raises RequestError if there is no such replica, or no other one runs."""
        if call.replica >= self.num_replicas:
            raise RequestError("There is no such replica.", status=404, param="replica")
        draining = sum(isinstance(opened.call, DrainReplicaCall) for opened in self._open.values())
        if orders and len(self._schedulers.links) - draining < 2:
            raise RequestError(
                "No other replica runs, to which the answers could go; start one first.", status=409
            )

    def _orders(self, call: AnySchedulerCall) -> list[_Order]:
        links = self._schedulers.links
        if not links or (found := call.receiver(self)) is None:
            return [(link, call) for link in links.values()]
        replica, order = found
        return [(links[replica], order)] if replica in links else []

    def _note_lease(self, call: AnySchedulerCall, link: SchedulerLink, value: Any) -> None:
        match call:
            case PinCall():
                now = time.monotonic()
                if len(self._leases) >= 1024:
                    self._leases = {n: one for n, one in self._leases.items() if one[1] > now}
                self._leases[value["lease"]] = (link.replica, now + call.ttl_s)
            case ReleaseCacheCall():
                self._leases.pop(call.lease, None)


def shared_by(request: GenerateRequest, grammar: GrammarUse | None) -> object:
    """What equal requests that share their answers have in common beside their prompt, whatever
    ``max_tokens`` is; None: the request shares none."""
    if not request.options.shares_answers:
        return None
    sampling = replace(request.sampling, max_tokens=None)
    return request.options.tenant.name, sampling, grammar
