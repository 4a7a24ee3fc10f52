"""Routing rules for replays: the router of this package, and rules of other projects as published.

- ``sglang``: the cache_aware policy of sgl-model-gateway with the defaults of its command line: an
  approximate tree of what was sent to each worker; the longest match if it covers more than 0.3 of
  the prompt, else the fewest requests in flight; the fewest requests, too, once the counts differ
  by more than 64 and by more than a factor of 1.5.
- ``dynamo``: the least ``prefill blocks + active blocks`` (overlap weight 1, temperature 0), with
  the prefills and blocks that the router itself counts as active, and overlaps by KV events
  (Dynamo, routing concepts).
- ``llm-d``: the highest sum of scores of the precise prefix-cache scorer (weight 3), the queue
  scorer (2) and the KV-utilization scorer (2), by metrics that are read every 50 ms.
"""

import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from radixrt.bench.arguments import RouterName
from radixrt.bench.cache.engine import SimulatedEngine
from radixrt.kv.events import EventBatch
from radixrt.messages.replicas import ReplicaLoad
from radixrt.messages.sequences import SequenceRequest
from radixrt.router.mirror import BlockHash, CacheMirror
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

    def prefilled(self, number: int) -> None:
        """A request has its first token."""

    def report(self, replica: int, engine: SimulatedEngine) -> None:
        """A replica has started a step, or has nothing more to compute."""

    def prompt(self, arrival: Arrival) -> RoutedPrompt:
        return RoutedPrompt.from_tokens(arrival.request.token_ids, "", self.page_size)

    def fewest(self) -> int:
        """The first replica with the fewest requests in flight."""
        return min(range(len(self.in_flight)), key=self.in_flight.__getitem__)


class _RadixRT(RoutingRule):
    """This package's router."""

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.router = Router(page_size, clock)
        self.sent = [0] * num_replicas
        for replica in range(num_replicas):
            self.router.join(replica)

    def pick(self, arrival: Arrival) -> int:
        prompt = self.prompt(arrival)
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


class _SGLang(RoutingRule):
    MATCH, DIFFERENCE, FACTOR = 0.3, 64, 1.5
    MAX_BLOCKS = 1 << 15
    """Blocks of 512 tokens in the tree of one worker: about the 2^26 characters of the default."""

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.trees: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in self.in_flight]
        """Least recently used block first."""

    def pick(self, arrival: Arrival) -> int:
        prompt = self.prompt(arrival)
        replica = self.fewest()
        least, most = min(self.in_flight), max(self.in_flight)
        if not (most - least > self.DIFFERENCE and most > self.FACTOR * least):
            matched = [_depth(prompt.hashes, tree) for tree in self.trees]
            longest = max(matched)
            if longest * self.page_size > self.MATCH * prompt.num_tokens:
                replica = matched.index(longest)
        tree = self.trees[replica]
        for block in reversed(prompt.hashes):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self.MAX_BLOCKS:
            tree.popitem(last=False)
        return replica


class _ByEvents(RoutingRule):
    """Knows the caches by their KV events."""

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self._mirrors = [CacheMirror() for _ in self.in_flight]

    @property
    def caches(self) -> list[set[BlockHash]]:
        return [mirror.hashes for mirror in self._mirrors]

    def report(self, replica: int, engine: SimulatedEngine) -> None:
        if frame := engine.next_events():
            self._mirrors[replica].apply(msgspec.msgpack.decode(frame, type=EventBatch))


class _Dynamo(_ByEvents):
    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.prefill_tokens = [0] * num_replicas
        self.blocks: list[Counter[BlockHash]] = [Counter() for _ in self.in_flight]
        """Blocks of the requests in flight, with the number of requests that have each."""
        self.prompts: dict[int, RoutedPrompt] = {}
        self.prefills: dict[int, int] = {}

    def pick(self, arrival: Arrival) -> int:
        prompt = self.prompt(arrival)
        to_compute = [
            prompt.num_tokens - self.page_size * _depth(prompt.hashes, cache)
            for cache in self.caches
        ]
        costs = [
            (self.prefill_tokens[r] + to_compute[r]) / self.page_size
            + len(self.blocks[r])
            + sum(block not in self.blocks[r] for block in prompt.hashes)
            for r in range(len(self.caches))
        ]
        replica = costs.index(min(costs))
        self.prefills[arrival.number] = to_compute[replica]
        self.prefill_tokens[replica] += to_compute[replica]
        self.prompts[arrival.number] = prompt
        self.blocks[replica].update(prompt.hashes)
        return replica

    def prefilled(self, number: int) -> None:
        self.prefill_tokens[self.replica_of[number]] -= self.prefills.pop(number)

    def finished(self, number: int) -> None:
        blocks = self.blocks[self.replica_of[number]]
        for block in self.prompts.pop(number).hashes:
            blocks[block] -= 1
            if not blocks[block]:
                del blocks[block]
        super().finished(number)


class _LLMD(_ByEvents):
    READ_S = 0.05

    def __init__(self, num_replicas: int, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_replicas, page_size, clock)
        self.loads = [ReplicaLoad() for _ in self.in_flight]
        self.read = list(self.loads)
        self.read_at = clock()

    def report(self, replica: int, engine: SimulatedEngine) -> None:
        super().report(replica, engine)
        self.loads[replica] = replica_load(engine.scheduler, engine.received)

    def pick(self, arrival: Arrival) -> int:
        if self.clock() - self.read_at >= self.READ_S:
            self.read, self.read_at = list(self.loads), self.clock()
        hashes = self.prompt(arrival).hashes
        prefix = _normal([_depth(hashes, cache) for cache in self.caches])
        queue = _normal([-load.waiting for load in self.read])
        free = [1 - load.held_tokens / load.pool_tokens for load in self.read]
        scores = [3 * p + 2 * q + 2 * f for p, q, f in zip(prefix, queue, free, strict=True)]
        return scores.index(max(scores))


def _normal(values: list[int]) -> list[float]:
    """Linearly, the least as 0 and the most as 1; all 1 if they are equal."""
    least, most = min(values), max(values)
    return [1.0 if most == least else (value - least) / (most - least) for value in values]


def _depth(hashes: list[BlockHash], known: "set[BlockHash] | OrderedDict[BlockHash, None]") -> int:
    """Leading blocks that are known."""
    return next((depth for depth, block in enumerate(hashes) if block not in known), len(hashes))


RULES: dict[RouterName, type[RoutingRule]] = {
    "radixrt": _RadixRT,
    "random": _Random,
    "round-robin": _RoundRobin,
    "power-of-two": _PowerOfTwo,
    "session-hash": _SessionHash,
    "sglang": _SGLang,
    "dynamo": _Dynamo,
    "llm-d": _LLMD,
}
