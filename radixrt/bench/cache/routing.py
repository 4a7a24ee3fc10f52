"""Routing rules for replays: the router of this package, and simple rules beside it."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.bench.arguments import RouterName
from radixrt.bench.cache.engine import SimulatedEngine
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.sequences import SequenceRequest
from radixrt.router.router import RoutedPrompt, Router
from radixrt.scheduler.process import replica_load

SEED = 1


@dataclass(frozen=True)
class Arrival:
    """A request that needs a replica."""

    number: int
    request: SequenceRequest
    session: int | None


class RoutingRule:
    """The rule of a single replica, and base of the others. Lengths are in simulated tokens."""

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        self.page_size, self.clock = page_size, clock
        self.in_flight = [0] * num_replicas
        self.replica_of: dict[int, int] = {}
        """Replicas of the requests in flight."""

    def choose(self, arrival: Arrival) -> int:
        """The replica of a request, which then is in flight."""
        replica = self.replica_of[arrival.number] = self.pick(arrival)
        self.in_flight[replica] += 1
        return replica

    def finished(self, number: int) -> None:
        """A request has its last token."""
        self.in_flight[self.replica_of.pop(number)] -= 1

    def pick(self, arrival: Arrival) -> int:
        return 0

    def report(self, replica: int, engine: SimulatedEngine) -> None:
        """A replica has started a step, or has nothing more to compute."""


class _RadixRT(RoutingRule):
    """This package's router."""

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.router = Router(page_size, clock)
        self.sent = [0] * num_replicas
        for replica in range(num_replicas):
            self.router.join(replica)

    def pick(self, arrival: Arrival) -> int:
        prompt = RoutedPrompt.from_tokens(arrival.request.token_ids, BASE_ROOT, self.page_size)
        chosen = self.router.choose(prompt, dict(enumerate(self.in_flight)))
        self.sent[chosen.replica] += 1
        self.router.send(prompt, chosen, self.sent[chosen.replica])
        return chosen.replica

    def report(self, replica: int, engine: SimulatedEngine) -> None:
        if frame := engine.next_events():
            self.router.take_events(replica, [frame])
        self.router.report(replica, replica_load(engine.scheduler, engine.received))


class _Random(RoutingRule):
    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.random = random.Random(SEED)

    def pick(self, arrival: Arrival) -> int:
        return self.random.randrange(len(self.in_flight))


class _RoundRobin(RoutingRule):
    def pick(self, arrival: Arrival) -> int:
        return arrival.number % len(self.in_flight)


class _PowerOfTwo(_Random):
    """Chooses, of two random replicas, the one with fewer requests in flight (Mitzenmacher,
    2001)."""

    def pick(self, arrival: Arrival) -> int:
        two = self.random.sample(range(len(self.in_flight)), 2)
        return min(two, key=self.in_flight.__getitem__)


class _SessionHash(RoutingRule):
    """Chooses by the session; for requests without one, by the first page."""

    def pick(self, arrival: Arrival) -> int:
        first_page = arrival.request.token_ids[: 4 * self.page_size]
        key = first_page if arrival.session is None else str(arrival.session).encode()
        return zlib.crc32(key) % len(self.in_flight)


RULES: dict[RouterName, type[RoutingRule]] = {
    "radixrt": _RadixRT,
    "random": _Random,
    "round-robin": _RoundRobin,
    "power-of-two": _PowerOfTwo,
    "session-hash": _SessionHash,
}
