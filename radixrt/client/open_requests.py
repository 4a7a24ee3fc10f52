"""The open requests of a client, their delivered tokens, and their takeover by the next engine when
an engine dies.

A new engine gets each open request again, with the tokens that its client has. The answers continue
with the tokens of an undisturbed run, because the noise of sampling depends only on seed, position
and token. Requests that come while no engine lives wait for the next one.

A request may be the cause of the deaths. A request that was in the engine at two deaths, without a
chunk between them, runs alone from then on: nothing else is sent until it has ended. If the engine
dies again, it is refused, and so is every equal request after it.

Another engine, for example a replica on another machine, could take over in the same way:
:meth:`OpenRequests.take_over` needs only that messages sent from then on reach it.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from radixrt.base.errors import EngineDiedError, RequestError, unexpected_error
from radixrt.messages.answers import AnswerChunk, AnswerReport
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.prompt_images import images_of
from radixrt.messages.requests import (
    NO_TENANT,
    GenerateRequest,
    PartialAnswer,
    Tenant,
)

log = logging.getLogger(__name__)

SUSPECT_AFTER = 2
"""Deaths without a chunk between them."""

ABORTED = "request_aborted"
"""Code of the error about a request that was aborted before it began."""

MAX_REMEMBERED = 1024
"""Requests that have killed an engine."""

MAX_IMAGE_CHARS = 512 << 20
"""Characters of the images of all open requests, which are kept for a takeover. More are refused
for now."""

Arrival = AnswerChunk | RequestError | EngineDiedError


class Mailbox:
    """Queue of the chunks of some requests that are not read yet, each with the number of its
    request. Its size is bounded in chunks without log-probabilities, of some 500 bytes each; larger
    chunks count as several. One task reads it."""

    def __init__(self, capacity: float) -> None:
        self._unread: deque[tuple[int, Arrival]] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Waits for the next chunk."""
        self._capacity = capacity
        self._size = 0
        self._overrun = False

    def put(self, number: int, arrival: Arrival) -> bool:
        """False: the queue is full. Its reader finds an error at its end; nothing more is taken."""
        if not self._overrun:
            self._overrun = self._size >= self._capacity
            self._size += _size(arrival)
            self._unread.append((number, _too_slow() if self._overrun else arrival))
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
        return not self._overrun

    async def get(self) -> tuple[int, Arrival]:
        while not self._unread:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        number, arrival = self._unread.popleft()
        self._size -= _size(arrival)
        return number, arrival


@dataclass(eq=False)
class OpenRequest:
    """One request and its answers so far."""

    request: GenerateRequest
    """As the client made it; its seed is set."""
    arrivals: Mailbox
    number: int = 0
    """Its index among the requests of the mailbox."""
    wire_id: str = ""
    """Its id in messages to the engine; empty: it was not sent, or its engine is dead."""
    delivered: dict[int, list[bytes]] = field(default_factory=dict)
    """Packed token ids of the chunks of each answer."""
    reports: dict[int, AnswerReport] = field(default_factory=dict)
    """The last of each answer."""
    of_first_engine: dict[int, AnswerReport] = field(default_factory=dict)
    """The last that the first engine sent of each answer, if that engine is dead."""
    deaths: int = 0
    """Engines that died while they had it, since its last chunk: a request that gets on does not
    kill."""
    is_aborted: bool = False
    """Its engine was told to drop it, and may die before it does."""
    unfinished: int = field(init=False)
    """Answers whose end the reader has not got."""
    image_chars: int = field(init=False)
    """The characters of the prompt's images, in base64."""

    def __post_init__(self) -> None:
        self.unfinished = self.request.sampling.n
        images = images_of(self.request.prompt)
        self.image_chars = sum(len(part.get("data", "")) for part in images)

    @property
    def key(self) -> tuple[str, str]:
        """Name of the tenant, and id."""
        return self.request.options.tenant.name, self.request.request_id

    def take(self, chunk: AnswerChunk) -> bool:
        """Note a chunk and hand it to the reader; False: the reader is too slow."""
        if chunk.progress is not None:  # the next step of the prompt may still kill the engine
            return bool(self.delivered) or self.deliver(chunk)
        self.deaths = 0
        self.delivered.setdefault(chunk.index, []).append(chunk.token_ids)
        first = self.of_first_engine.get(chunk.index)
        if first is not None:
            chunk = msgspec.structs.replace(chunk, report=_of_first_engine(chunk.report, first))
        self.reports[chunk.index] = chunk.report
        if chunk.finish_reason is None and not self.request.stream:
            return True  # the reader gets the answer whole
        return self.deliver(chunk)

    def deliver(self, arrival: Arrival) -> bool:
        """Hand a chunk or an error to the reader; False: the reader is too slow."""
        return self.arrivals.put(self.number, arrival)

    def engine_ended(self, by_death: bool) -> None:
        """Its engine has died, or its replica has drained."""
        self.wire_id = ""
        self.deaths += by_death
        self.of_first_engine = {**self.reports, **self.of_first_engine}

    def abort(self) -> None:
        """End without an engine: the answers where they are, or with an error if none has begun."""
        if self.delivered:
            self.end()
        else:
            self.deliver(RequestError("The request was aborted before it began.", code=ABORTED))

    def fail(self, error: RequestError) -> None:
        """The engine has refused or lost it. What it aborts before it begins may have begun in an
        engine before it."""
        if error.code == ABORTED:
            self.abort()
        else:
            self.deliver(error)

    def end(self) -> None:
        """Let the answers end where they are, with finish reason "abort"."""
        for index in range(self.request.sampling.n):
            report = self.reports.get(index, AnswerReport())
            if report.finish_reason is None:
                report = msgspec.structs.replace(report, finish_reason="abort")
                self.take(
                    AnswerChunk(
                        request_id=self.wire_id, index=index, text="", token_ids=b"", report=report
                    )
                )

    def message(self) -> GenerateRequest:
        """The request for a new engine, with the delivered tokens."""
        answers = [self._partial(index) for index in range(self.request.sampling.n)]
        return msgspec.structs.replace(
            self.request, request_id=self.wire_id, resumed=answers if self.delivered else []
        )

    def _partial(self, index: int) -> PartialAnswer:
        report = self.reports.get(index, AnswerReport())
        return PartialAnswer(
            b"".join(self.delivered.get(index, ())),
            report.retries,
            report.finish_reason is not None,
        )

    def digest(self) -> bytes:
        """Equal for equal requests of all clients. The seed does not count: a request that brings
        none gets a new one each time."""
        sampling = msgspec.structs.replace(self.request.sampling, seed=None)
        root = BASE_ROOT._replace(adapter=self.request.options.root.adapter)
        options = msgspec.structs.replace(
            self.request.options, sampling=sampling, deadline=None, tenant=NO_TENANT, root=root
        )
        bare = msgspec.structs.replace(
            self.request, request_id="", group_id="", group_size=1, options=options
        )
        return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()


class OpenRequests:
    """All open requests of a client, in the order in which they came."""

    def __init__(
        self,
        send: Callable[[GenerateRequest], None],
        engine_is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            send: to the engine; raises a RequestError if the request cannot be sent.
            engine_is_alive: requests that come while it is not wait for :meth:`take_over`.
        """
        self._send = send
        self._engine_is_alive = engine_is_alive
        self._by_id: dict[tuple[str, str], OpenRequest] = {}
        """By name of the tenant and id: tenants may choose the same ids."""
        self._by_wire_id: dict[str, OpenRequest] = {}
        self._image_chars = 0
        """The characters of all requests' images."""
        self._num_sent = 0
        self._held: deque[OpenRequest] = deque()
        """Wait until a suspect has ended, or for an engine."""
        self._suspects: deque[OpenRequest] = deque()
        self._alone: OpenRequest | None = None
        """The suspect that runs."""
        self._killers: OrderedDict[bytes, None] = OrderedDict()
        """Digests of requests that have killed an engine."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_id.values()))

    def find(self, request_id: str, tenant: Tenant = NO_TENANT) -> OpenRequest | None:
        return self._by_id.get((tenant.name, request_id))

    def on_wire(self, wire_id: str) -> OpenRequest | None:
        """The request to which an answer of the engine belongs, if it is still open."""
        return self._by_wire_id.get(wire_id)

    def add(self, open_request: OpenRequest) -> None:
        """Send a request, or let it wait until a suspect has ended.

        Raises:
            RequestError: its id is in use, it can't be sent, an equal one has killed an engine, or the
                open requests have too many images.
        """
        key = open_request.key
        if key in self._by_id:
            raise id_in_use(open_request.request.request_id)
        if self._killers and open_request.digest() in self._killers:
            raise _deadly()
        own = open_request.image_chars
        if own and self._image_chars + own > MAX_IMAGE_CHARS:
            raise _too_many_images()
        if self._engine_is_alive() and not (self._held or self._suspects or self._alone):
            self._dispatch(open_request)
        else:
            self._held.append(open_request)
        self._by_id[key] = open_request
        self._image_chars += own

    def remove(self, open_request: OpenRequest) -> None:
        """It has ended."""
        del self._by_id[open_request.key]
        self._image_chars -= open_request.image_chars
        self._by_wire_id.pop(open_request.wire_id, None)
        if open_request is self._alone:
            self._alone = None
        for waiting in (self._held, self._suspects):
            if open_request in waiting:
                waiting.remove(open_request)
        self._go_on()

    def take_over(self, lost: Collection[str] | None = None, *, by_death: bool = True) -> None:
        """Send the open requests of a dead engine to a new engine.

        Args:
            lost: their ids on the wire, if a replica has ended and others go on; None: all.
            by_death: False: it has drained, so no request can be the cause.
        """
        wire_ids = set(self._by_wire_id if lost is None else lost)
        alone = self._alone
        if alone is not None and alone.wire_id in wire_ids:
            self._alone = None
            if by_death and alone.deaths >= SUSPECT_AFTER:  # no chunk since it runs alone
                self._remember(alone)
                alone.deliver(_deadly())
                alone.wire_id = ""
        for open_request in self:
            if open_request.wire_id not in wire_ids:
                continue  # held, refused, or in a replica that lives
            open_request.engine_ended(by_death)
            if open_request.is_aborted:
                open_request.abort()
                continue
            is_suspect = open_request.deaths >= SUSPECT_AFTER
            (self._suspects if is_suspect else self._held).append(open_request)
        for wire_id in wire_ids:
            self._by_wire_id.pop(wire_id, None)
        self._go_on()

    def fail(self, error: RequestError | EngineDiedError) -> None:
        """End all of them with an error."""
        for open_request in self:
            open_request.deliver(error)

    # ------------------------------------------------------------ sending

    def _go_on(self) -> None:
        """Send the requests that may be sent now: a suspect when nothing else runs, else all held
        requests."""
        if self._alone is not None or not self._engine_is_alive():
            return
        if not self._suspects:
            while self._held:
                self._dispatch_or_fail(self._held.popleft())
        elif not self._by_wire_id:
            self._alone = self._suspects.popleft()
            self._dispatch_or_fail(self._alone)

    def _dispatch_or_fail(self, open_request: OpenRequest) -> None:
        try:
            self._dispatch(open_request)
        except (RequestError, EngineDiedError) as error:
            open_request.deliver(error)
        except Exception as error:
            log.error("A request could not be sent again.", exc_info=error)
            open_request.deliver(unexpected_error())

    def _dispatch(self, open_request: OpenRequest) -> None:
        """Wire ids are never used twice, so that late chunks of a request that was dropped can't be
        taken for those of a new one of the same name."""
        self._num_sent += 1
        open_request.wire_id = f"{open_request.request.request_id}#{self._num_sent}"
        self._send(open_request.message())
        self._by_wire_id[open_request.wire_id] = open_request

    def _remember(self, open_request: OpenRequest) -> None:
        self._killers[open_request.digest()] = None
        if len(self._killers) > MAX_REMEMBERED:
            self._killers.popitem(last=False)


def _of_first_engine(report: AnswerReport, first: AnswerReport) -> AnswerReport:
    return msgspec.structs.replace(
        report,
        cached_tokens=first.cached_tokens,
        cache_write_tokens=first.cache_write_tokens,
        encode_s=first.encode_s,
        grammar_s=first.grammar_s,
        queued_s=first.queued_s,
        prefill_s=first.prefill_s,
    )


def id_in_use(request_id: str) -> RequestError:
    return RequestError(
        f"A request with id {request_id!r} is in flight; choose another id.", param="rid"
    )


def _size(arrival: Arrival) -> int:
    """In chunks without log-probabilities; those of a prompt come once and do not count."""
    if not isinstance(arrival, AnswerChunk) or not arrival.logprobs:
        return 1
    return 1 + sum(1 + len(token.top) for token in arrival.logprobs) // 2


def _too_slow() -> RequestError:
    return RequestError(
        "The answer was dropped, since too much of it waits to be read.", status=408
    )


def _too_many_images() -> RequestError:
    return RequestError(
        "The server has too many images at work; retry later.", status=503, retry_after_s=5
    )


def _deadly() -> RequestError:
    return RequestError(
        "The engine died three times while it worked on this request, the last time on it alone. It is refused from now "
        "on; please report it with the server's log.",
        status=500,
        code="request_kills_engine",
    )
