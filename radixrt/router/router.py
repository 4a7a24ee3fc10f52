"""Chooses for each request the replica with the least cost, in seconds.

    cost = wait + (1 + EVICTION_WEIGHT * evicting) * prefill + BUSY_PRICE_S * busy * new +
    KV_PRICE_S * context + ANSWER_PRICE_S * answers

*wait* is the time until the replica computes this prompt: of the steps in flight, and of the
prompts that are partly computed, wait or were sent since its last report. The scheduler lets a
short prompt overtake long ones, so each counts with at most the time of this prompt. A prompt whose
prefix is still to be computed overtakes no part of it. *prefill* is the time to compute the tokens
of the prompt that are not cached: ``a (n - m) + b (n² - m²) / 2`` for m of n tokens, with a and b
fitted to the steps of the replica. It counts several times where it evicts others: *evicting* is
the share of these tokens that find no free page. A tier below the pool would make the prefill
``min(compute, load)``; there is none yet.

A session stays where its first prompt went, so a prompt also pays for the load that its later turns
will meet there. *busy* is the share of the last seconds in which the replica had prompts to
compute, and *new* is (n - m) / n: a session that is at home does not pay, and leaves only for a
wait. *context* is that of the running sequences as a share of the pool: they compute beside the
prompts, and their pages are not free. Each counts what it shares with others, so a prefix of most
requests spreads. *answers* is the number of sequences that are not complete, so that short prompts,
which cost nothing else, spread. The caller knows this number at any time; a report may be some
short steps old.

The blocks of a prompt count as cached from the decision on, for a few seconds or until the
replica's events tell the truth, so prompts that arrive together share a prefix or spread as the
cost says.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import msgspec

from radixrt.kv.events import EventBatch, ReplayRequest, prompt_hashes
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import PackedIds, num_ids
from radixrt.messages.replicas import ReplicaLoad
from radixrt.router.mirror import BlockHash, CacheMirror, unpack_hashes

EVICTION_WEIGHT = 3.0
"""Of the prefill, for the share of the tokens that replace others in a full pool; added to its own
weight of 1."""

BUSY_PRICE_S = 1.0
"""Cost of a replica that always computes prompts, against one that computes none."""

BUSY_OVER_S = 10.0
"""Time constant of the mean of *busy*."""

KV_PRICE_S = 1.0
"""Cost of running sequences with as much context as the pool has, against none."""

ANSWER_PRICE_S = 0.01
"""Cost of a further sequence in a replica."""

EXPECTED_S = 5.0
"""Longest time for which the blocks of a prompt count as cached though no event has told so; at
least half of it."""

SECONDS_PER_TOKEN = 1e-4
"""Until a replica has told its own."""


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt as the router sees it."""

    num_tokens: int
    hashes: list[BlockHash]
    """Of its full blocks."""

    @staticmethod
    def from_tokens(token_ids: PackedIds, root: CacheRoot, page_size: int) -> "RoutedPrompt":
        hashes = unpack_hashes(prompt_hashes(root, token_ids, page_size))
        return RoutedPrompt(num_ids(token_ids), hashes)


class Candidate(NamedTuple):
    """A replica for a prompt."""

    replica: int
    cached_tokens: int
    """Leading tokens of the prompt that it has cached, or will have when the prompt is computed."""
    prefill_s: float
    cost_s: float


class _Pending(NamedTuple):
    """A prompt that was sent."""

    number: int
    """Of its first sequence."""
    prefill_s: float
    num_tokens: int
    forget_at: float


@dataclass(eq=False)
class _Replica:
    """What the router knows of a replica."""

    has_states: bool
    """Its model has recurrent layers: a prefix can be used up to its last block with a state."""
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    reported_at: float = 0.0
    mirror: CacheMirror = field(default_factory=CacheMirror)
    chosen: int = 0
    """Prompts since its start."""
    pending: deque["_Pending"] = field(default_factory=deque)
    """Prompts that are not in its load yet."""
    pending_s: float = 0.0
    pending_tokens: int = 0
    sent_s: float = 0.0
    """Seconds of all prompts that were sent to it, less for older ones, at ``sent_at``."""
    sent_at: float = 0.0
    young: set[BlockHash] = field(default_factory=set)
    old: set[BlockHash] = field(default_factory=set)
    """Blocks of the prompts that were sent to it and are not in the mirror, in two generations."""

    def matched_blocks(self, hashes: list[BlockHash]) -> int:
        """Leading blocks that it has. Its tree has the prefix of each block, so a binary search
        finds the last one."""
        cached, young, old = self.mirror.hashes, self.young, self.old
        return bisect_left(
            hashes,
            True,
            key=lambda block: block not in cached and block not in young and block not in old,
        )

    def usable_blocks(self, hashes: list[BlockHash]) -> int:
        """Leading blocks that it need not compute. Blocks that are expected count with a state."""
        usable, mirror = self.matched_blocks(hashes), self.mirror
        if self.has_states:
            while usable and (block := hashes[usable - 1]) in mirror.hashes:
                if block in mirror.states:
                    break
                usable -= 1
        return usable

    def expect(self, hashes: list[BlockHash]) -> None:
        """The blocks of a prompt will be cached."""
        cached = self.mirror.hashes
        self.young.update(hashes[bisect_left(hashes, True, key=lambda b: b not in cached) :])

    def busy(self, now: float) -> float:
        """Seconds of prefill in a second, over the last seconds."""
        return self.sent_s * exp((self.sent_at - now) / BUSY_OVER_S) / BUSY_OVER_S

    def count_sent(self, prefill_s: float, now: float) -> None:
        self.sent_s = self.busy(now) * BUSY_OVER_S + prefill_s
        self.sent_at = now

    def computed_blocks(self, hashes: list[BlockHash], matched: int) -> int:
        """Of the leading blocks that it has or will have, those that are computed."""
        cached = self.mirror.hashes
        if not matched or hashes[matched - 1] in cached:
            return matched
        return bisect_left(hashes, True, 0, matched, key=lambda block: block not in cached)

    def wait_s(self, own_s: float, now: float) -> float:
        """Seconds until a prompt is computed, without its own; ``own_s`` is that part: longer
        prompts delay it by no more."""
        load = self.load
        rests_s = sum(min(rest_s, own_s) for rest_s in load.partial_s)
        rests_s += min(load.waiting_s, load.waiting * own_s)
        pending_s = min(self.pending_s, len(self.pending) * own_s)
        return max(0.0, load.step_s + rests_s - (now - self.reported_at)) + pending_s


class Router:
    """Knows the cache and the load of each replica.

    Args:
        page_size: tokens in a block.
        clock: seconds from any fixed moment.
    """

    def __init__(self, page_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_size = page_size
        self._clock = clock
        self._replicas: dict[int, _Replica] = {}
        self._batches = msgspec.msgpack.Decoder(EventBatch)
        self._turned_at = clock()

    # ------------------------------------------------------------ replicas

    @property
    def replicas(self) -> list[int]:
        """Numbers of those that requests can be sent to."""
        return list(self._replicas)

    def join(self, replica: int, *, has_states: bool = False) -> None:
        """A replica has started, with an empty cache.

        Args:
            has_states: its model has recurrent layers, whose states it keeps.
        """
        self._replicas[replica] = _Replica(has_states)

    def leave(self, replica: int) -> None:
        """A replica has died, or drains."""
        self._replicas.pop(replica, None)

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Take a replica's own account of its load."""
        known = self._replicas[replica]
        known.load, known.reported_at = load, self._clock()
        while known.pending and (
            known.pending[0].number <= load.received
            or known.pending[0].forget_at < known.reported_at
        ):
            reported = known.pending.popleft()
            known.pending_s -= reported.prefill_s
            known.pending_tokens -= reported.num_tokens
        if not known.pending:
            known.pending_s = 0.0  # without rounding errors

    def take_events(self, replica: int, frames: Iterable[bytes]) -> None:
        """Take encoded batches of a replica's KV events.

        Raises:
            msgspec.DecodeError: a frame is no batch.
        """
        mirror = self._replicas[replica].mirror
        for frame in frames:
            mirror.apply(self._batches.decode(frame))

    def heartbeat(self, replica: int, stream: str, sequence: int) -> ReplayRequest | None:
        """A replica has published the batches of ``stream`` up to ``sequence``; returns the request
        for those that are missing."""
        mirror = self._replicas[replica].mirror
        mirror.heard_of(stream, sequence)
        return mirror.missing()

    # ------------------------------------------------------------ decisions

    def choose(
        self, prompt: RoutedPrompt, answers: Mapping[int, int], home: int | None = None
    ) -> Candidate:
        """The replica with the least cost.

        Args:
            answers: of each replica, the sequences that were sent to it and are not complete.
            home: the replica to choose whatever it costs, if it is there.
        """
        return min(
            self.candidates(prompt, answers),
            key=lambda one: (one.replica != home, one.cost_s, self._replicas[one.replica].chosen),
        )

    def candidates(self, prompt: RoutedPrompt, answers: Mapping[int, int]) -> list[Candidate]:
        """The cost of the prompt on each replica; see :meth:`choose`."""
        now = self._clock()
        if now - self._turned_at > EXPECTED_S / 2:
            self._forget_old(now)
        return [self._candidate(number, prompt, answers[number], now) for number in self._replicas]

    def send(self, prompt: RoutedPrompt, chosen: Candidate, number: int) -> None:
        """Count a prompt as sent, until the replica has reported it.

        Args:
            number: of its first sequence, among all sequences sent to this start of the replica;
                counted from 1.
        """
        replica = self._replicas[chosen.replica]
        replica.chosen += 1
        now = self._clock()
        replica.count_sent(chosen.prefill_s, now)
        forget_at = now + EXPECTED_S
        replica.pending.append(_Pending(number, chosen.prefill_s, prompt.num_tokens, forget_at))
        replica.pending_s += chosen.prefill_s
        replica.pending_tokens += prompt.num_tokens
        replica.expect(prompt.hashes)

    def owner(self, prompt: RoutedPrompt) -> int:
        """The replica that has most of a prompt."""
        return max(self._replicas, key=lambda r: self._replicas[r].matched_blocks(prompt.hashes))

    def _candidate(self, number: int, prompt: RoutedPrompt, answers: int, now: float) -> Candidate:
        replica = self._replicas[number]
        load, tokens = replica.load, prompt.num_tokens
        usable = replica.usable_blocks(prompt.hashes)
        computed = replica.computed_blocks(prompt.hashes, usable) * self.page_size
        cached = min(usable * self.page_size, tokens - 1)  # the last token is always computed
        prefill_s = _prefill_s(load, tokens, cached)
        own_s = _prefill_s(load, tokens, computed) if computed < cached else prefill_s
        free = load.free_tokens - replica.pending_tokens
        evicting = 1 - min(1.0, max(0, free) / (tokens - cached))
        context = (load.context_tokens + replica.pending_tokens) / load.pool_tokens
        cost_s = (
            replica.wait_s(own_s, now)
            + (1 + EVICTION_WEIGHT * evicting) * prefill_s
            + BUSY_PRICE_S * replica.busy(now) * (tokens - cached) / tokens
            + KV_PRICE_S * context
            + ANSWER_PRICE_S * answers
        )
        return Candidate(number, cached, prefill_s, cost_s)

    def _forget_old(self, now: float) -> None:
        self._turned_at = now
        for replica in self._replicas.values():
            replica.old, replica.young = replica.young, set()


def _prefill_s(load: ReplicaLoad, tokens: int, cached: int) -> float:
    """Seconds to compute a prompt of which the first ``cached`` tokens are cached."""
    by_token = load.seconds_per_token or SECONDS_PER_TOKEN
    pairs = (tokens + cached) * (tokens - cached) / 2
    return load.slowdown * (by_token * (tokens - cached) + load.seconds_per_pair * pairs)
