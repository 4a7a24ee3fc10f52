"""The waiting queue: the order in which sequences are admitted, ``--schedule-policy``, and
retracted.

Tenants take turns by the tokens that they have got (:mod:`radixrt.scheduler.queue.accounts`); the
order of the queue holds among the sequences of one tenant. Measured on recorded traffic
(docs/internals/queue_order.md), the order has the largest effect on the hit rate: longest prefix
match gains some thirty points over first come first served where the server is overloaded. Pure
longest prefix match starves requests without a cached prefix. A bound on their wait in seconds
becomes first come first served under high load. A mixing ratio, where every n-th pick is the
oldest, keeps the gain and bounds the longest wait.

The cached prefix of a sequence is looked up when it arrives. Afterwards the order stays true
without a lookup of every sequence in every step: insertions into the tree say whose prefix may have
grown (:mod:`radixrt.scheduler.radix.prefix_watch`), and the sequence about to be picked is looked
up once more, because eviction can only have made its prefix shorter, and so its place worse.

When the KV pool has no free page, the sequence with the shortest answer is retracted. It loses the
least beyond its prompt, and its prompt, recently used and often shared, is likely to be found in
the tree again. Why work always ends. Assume that no more requests arrive. Of the running sequences
that still take pages, call the oldest of the most urgent ones the *first*. It is never retracted
while there is another.

- If the first decodes, it gets a token in every step and finishes, unless another sequence becomes
  the first. That one is older or more urgent, so this happens at most once for each sequence.
- If it lacks pages for its prompt, no sequence is admitted, because admission keeps those pages
  free. So the others become fewer: each ends or is retracted after no more steps than its answer
  has tokens. No request needs more than the pool.
- If it runs alone, it is retracted only if sequences whose last tokens are in flight hold the pages
  it lacks. Those finish with the steps in flight.
- Leases (:mod:`radixrt.scheduler.radix.leases`) hold pages as well. They are broken one by one if
  no sequence runs and the next prompt lacks pages, or if a sequence runs alone and lacks a page.
- One plan cannot loop for ever: an admitted sequence is computed in the same step (the planner
  asserts it), and a retraction after which none is admitted leaves one fewer running.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Literal

from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.messages.requests import Tenant
from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.queue.accounts import Account, Accounts
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.node import Match
from radixrt.scheduler.radix.prefix_watch import MissingPage
from radixrt.scheduler.sequence import Sequence


@dataclass(frozen=True)
class QueueOrder:
    """An order of waiting sequences."""

    prefers: Literal["long prefix", "short prefill", "age"]
    oldest_every: int = 1
    """Every n-th pick is the oldest sequence."""
    by_priority: bool = False
    """Order by the request's ``priority`` before everything else."""

    @property
    def depends_on_cache(self) -> bool:
        return self.prefers != "age"

    def rank(self, sequence: Sequence) -> int:
        """The first key, before age and prefix; the smallest first."""
        return sequence.options.priority if self.by_priority else 0

    def cost(self, sequence: Sequence, cached_tokens: int) -> int:
        """The key among sequences of one rank; the smallest first."""
        match self.prefers:
            case "long prefix":
                return -cached_tokens
            case "short prefill":
                return sequence.num_tokens - cached_tokens
            case "age":
                return 0


ORDERS: dict[SchedulePolicyName, QueueOrder] = {
    "lpm": QueueOrder("long prefix", oldest_every=4),
    "suf": QueueOrder("short prefill", oldest_every=8),
    "fcfs": QueueOrder("age"),
    "priority": QueueOrder("long prefix", oldest_every=4, by_priority=True),
}


def choose_victim(running: list[Sequence], order: QueueOrder) -> Sequence:
    """The sequence to retract. ``running`` are the sequences that still take pages, at least
    one."""
    oldest = min(running, key=lambda sequence: (order.rank(sequence), sequence.seq_id))
    others = [sequence for sequence in running if sequence is not oldest]
    return max(others or running, key=lambda s: (order.rank(s), -s.num_output, s.seq_id))


LOOKUPS_PER_STEP = 8
TOKENS_PER_STEP = 1 << 17
"""Prompt tokens compared in these lookups. Both bound the time of a step; the other lookups wait
for the next step."""

NEXT_IN_LINE, LOOKUPS_IN_LINE = 16, 2
"""Where the eviction policy follows the queue, 2 of the first 16 in order of arrival are looked up
in each step."""

LOOKUPS_PER_PICK = 8
"""If that many in a row turn out to have lost their prefix, the best known one is picked."""


@dataclass(eq=False, slots=True)
class _Waiting:
    sequence: Sequence
    retracted: bool
    num_cached: int = -1
    """Pages of its prefix when last looked up."""
    missing_page: MissingPage | None = None


class _Line:
    """The waiting sequences of one tenant."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.best: LazyHeap[int] = LazyHeap()
        self.oldest: LazyHeap[int] = LazyHeap()
        self.shortest: LazyHeap[int] = LazyHeap()
        self.picks = 0


class WaitingQueue:
    """Sequences that wait for a slot, in a queue order; retracted ones come before others of their
    rank and tenant."""

    def __init__(self, order: QueueOrder, kv: KVCache) -> None:
        self.order = order
        self.accounts = Accounts()
        self._kv = kv
        self._to_compute = _PromptTokens()
        self.most_output = 0
        """Tokens that their answers have at most, all together."""
        self._waiting: dict[int, _Waiting] = {}
        self._lines: dict[str, _Line] = {}
        """The lines by the tenant's name."""
        self._busy: dict[str, _Line] = {}
        """The lines in which sequences wait."""
        self._served = 0.0
        """The counter of the tenant that was served last."""
        self._watch = kv.prefix_watch
        self._next_in_line: list[int] = []
        self._needs_prefixes = order.depends_on_cache or kv.policy.follows_queue

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens that the waiting sequences add to the work: those neither cached nor shared
        among them."""
        return self._to_compute.total

    def add(self, sequence: Sequence, *, retracted: bool = False) -> None:
        """Add a sequence that has just arrived, or one that was retracted."""
        waiting = self._waiting[sequence.seq_id] = _Waiting(sequence, retracted)
        self._count_prompt(waiting, +1)
        self.most_output += sequence.max_output
        rank = self.order.rank(sequence)
        line = self._join_line(sequence)
        line.oldest.place(sequence.seq_id, rank, not retracted)
        line.shortest.place(sequence.seq_id, rank, sequence.num_tokens)
        if self._needs_prefixes:
            self._look_up(waiting)

    def _join_line(self, sequence: Sequence) -> _Line:
        """The line of a sequence's tenant, which begins to wait if it did not."""
        account = sequence.account = self.accounts.for_tenant(sequence.options.tenant)
        if account.name in self._busy:
            return self._busy[account.name]
        others = [line.account.counter for line in self._busy.values()]
        account.lift(min(others, default=self._served))
        line = self._lines.get(account.name) or _Line(account)
        self._lines[account.name] = self._busy[account.name] = line
        return line

    def remove(self, seq_id: int) -> None:
        """Remove a sequence; does nothing if it does not wait here."""
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return
        self._count_prompt(waiting, -1)
        self.most_output -= waiting.sequence.max_output
        self._kv.policy.forget(seq_id)
        line = self._busy[waiting.sequence.account.name]
        line.best.discard(seq_id)
        line.oldest.discard(seq_id)
        line.shortest.discard(seq_id)
        if not len(line.oldest):
            del self._busy[line.account.name]
        if waiting.missing_page is not None:
            self._watch.discard(seq_id, waiting.missing_page)

    def refresh(self) -> None:
        """Once a step: look up a bounded number of sequences whose prefix may have grown."""
        lookups, tokens = LOOKUPS_PER_STEP, TOKENS_PER_STEP
        while lookups > 0 and tokens > 0 and (seq_id := self._watch.take_outdated()) is not None:
            waiting = self._waiting.get(seq_id)
            if waiting is not None:
                self._look_up(waiting)
                lookups -= 1
                tokens -= waiting.num_cached * self._kv.page_size
        if self._kv.policy.follows_queue:
            self._refresh_expected()

    def _refresh_expected(self) -> None:
        """Look up sequences whose prefix was evicted, and a few of the oldest in turn: eviction
        spares their prefixes, and the nodes where those end change when edges are split or
        joined."""
        if not self._next_in_line:
            self._next_in_line = [*islice(self._waiting, NEXT_IN_LINE)]
        again = self._kv.policy.take_shortened(LOOKUPS_IN_LINE)
        again += self._next_in_line[-LOOKUPS_IN_LINE:]
        del self._next_in_line[-LOOKUPS_IN_LINE:]
        for seq_id in again:
            waiting = self._waiting.get(seq_id)
            if waiting is not None:
                self._look_up(waiting)

    def head(self) -> tuple[Sequence, Match | None]:
        """The next sequence and its cached prefix; the queue must not be empty."""
        line = self._next_line()
        if line.picks % self.order.oldest_every == self.order.oldest_every - 1:
            sequence = self._waiting[line.oldest.first()].sequence
            return sequence, self._kv.find_prefix(sequence)
        for _ in range(LOOKUPS_PER_PICK):
            waiting = self._waiting[line.best.first()]
            match = self._kv.find_prefix(waiting.sequence)
            self._place(waiting, match)
            if line.best.first() == waiting.sequence.seq_id:
                break
        return waiting.sequence, match

    def shortest(self) -> tuple[Sequence, Match | None]:
        """The sequence with the fewest tokens to compute among the most urgent ones of the tenant
        whose turn it is, and its cached prefix."""
        waiting = self._waiting[self._next_line().shortest.first()]
        match = self._kv.find_prefix(waiting.sequence)
        self._place(waiting, match)
        return waiting.sequence, match

    def has_place_for(self, tenant: Tenant, most: int) -> bool:
        """Whether a tenant may queue although ``most`` sequences wait: it has less than an even
        part of them, so those of others fill the queue. No queue gets much longer by it: the parts
        of t tenants are 1/2, 1/3, … 1/t."""
        line = self._busy.get(tenant.name)
        own = 0 if line is None else len(line.oldest)
        others = len(self._busy) - (line is not None)
        return others > 0 and own * (others + 1) < most

    def unserved(self) -> Account | None:
        """The tenant whose turn it is, if none of its sequences runs and those of others do."""
        if not self._busy or len(self._lines) == 1:
            return None
        account = self._next_line().account
        return None if account.running else account

    def _next_line(self) -> _Line:
        """That of the tenant that has got least."""
        if len(self._busy) == 1:
            return next(iter(self._busy.values()))
        return min(
            self._busy.values(), key=lambda line: (line.account.counter, line.account.running)
        )

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that has been admitted."""
        line = self._busy[sequence.account.name]
        if not self._waiting[sequence.seq_id].retracted:
            line.picks += 1
        self._served = line.account.counter
        self.remove(sequence.seq_id)

    def _look_up(self, waiting: _Waiting) -> None:
        match = self._kv.find_prefix(waiting.sequence)
        self._place(waiting, match)
        if match is not None:
            self._kv.expect(waiting.sequence, match)

    def _place(self, waiting: _Waiting, match: Match | None) -> None:
        """Note the length of a sequence's cached prefix, and give it its place in the order."""
        sequence, num_cached = waiting.sequence, 0 if match is None else match.num_pages
        if num_cached != waiting.num_cached:
            self._count_prompt(waiting, -1)
            waiting.num_cached = num_cached
            line = self._busy[sequence.account.name]
            line.best.place(sequence.seq_id, *self._key(waiting))
            if waiting.missing_page is not None:
                self._watch.discard(sequence.seq_id, waiting.missing_page)
            waiting.missing_page = self._kv.missing_page(sequence, num_cached)
            self._count_prompt(waiting, +1)
            rank, tokens = self.order.rank(sequence), self._tokens_to_compute(waiting)
            line.shortest.place(sequence.seq_id, rank, tokens)
        if waiting.missing_page is not None:
            self._watch.add(sequence.seq_id, waiting.missing_page)

    def _tokens_to_compute(self, waiting: _Waiting) -> int:
        return waiting.sequence.num_tokens - max(waiting.num_cached, 0) * self._kv.page_size

    def _count_prompt(self, waiting: _Waiting, sign: int) -> None:
        """Add (1) or subtract (-1) a sequence's prompt."""
        group = waiting.sequence.seq_id if waiting.missing_page is None else waiting.missing_page
        self._to_compute.count(group, sign, self._tokens_to_compute(waiting))

    def _key(self, waiting: _Waiting) -> tuple[int, bool, int]:
        """The order before age. Retracted sequences keep the order of their arrival: they have been
        picked before."""
        sequence, order = waiting.sequence, self.order
        cost = order.cost(sequence, waiting.num_cached * self._kv.page_size)
        return order.rank(sequence), not waiting.retracted, 0 if waiting.retracted else cost


class _PromptTokens:
    """Sums the tokens to compute of prompts. Sequences that lack the same page count together as
    one, of mean length: the first computes most of it for the others."""

    def __init__(self) -> None:
        self.total = 0.0
        self._groups: dict[MissingPage | int, tuple[int, int]] = {}
        """Number and tokens of the sequences, by the page that they lack, or the id of one that
        lacks none."""

    def count(self, group: MissingPage | int, sign: int, tokens: int) -> None:
        number, summed = self._groups.pop(group, (0, 0))
        self.total -= summed / max(number, 1)
        number, summed = number + sign, summed + sign * tokens
        if number:
            self._groups[group] = number, summed
            self.total += summed / number
        if not self._groups:
            self.total = 0.0  # no rounding errors are left
