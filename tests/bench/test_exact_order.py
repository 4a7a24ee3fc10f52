"""Order of admission and cached prefixes: the queue's bounded lookups against an exact match of all
waiting requests. ``make test`` takes each trace with one policy, ``make test-tree`` with all."""

from collections import OrderedDict
from typing import Any

import pytest

from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest, read_trace
from radixrt.scheduler.queue import waiting_queue
from radixrt.scheduler.radix.eviction import POLICIES, least_recently_used
from tests.bench.test_bench_cache import IN_FULL, SYMBOL, TRACES, conversations, touch

PER_PAGE = BLOCK_TOKENS // SYMBOL
OLDEST_EVERY = {"fcfs": 1, "lpm": 4, "suf": 8}


class PageSet:
    """Pages by name in order of use; a prompt's pages are its block ids, those with a part of an
    answer are its own."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pages: OrderedDict[object, None] = OrderedDict()

    def find(self, request: TraceRequest) -> int:
        """Leading pages of a prompt; the last of its tokens is always computed."""
        most = (symbols(request) - 1) // PER_PAGE
        for number, block in enumerate(request.blocks[:most].tolist()):
            if block not in self.pages:
                return number
        return most

    def serve(self, number: int, request: TraceRequest) -> None:
        """Compute what is missing and the answer, whose last token is nobody's input."""
        computed = symbols(request) + max(1, request.output_tokens // SYMBOL) - 1
        names: list[object] = request.blocks[: symbols(request) // PER_PAGE].tolist()
        names += [(number, i) for i in range(len(names), computed // PER_PAGE)]
        found = self.find(request)
        touch(self.pages, names[:found])
        while self.num_pages - len(self.pages) < -(-computed // PER_PAGE) - found:
            self.pages.popitem(last=False)
        touch(self.pages, names)


def symbols(request: TraceRequest) -> int:
    return max(1, request.input_tokens // SYMBOL)


def simulate(trace: Trace, num_pages: int, policy: str) -> tuple[list[int], list[int]]:
    """The order in which requests that all wait are served one by one, and the cached tokens of
    each."""
    cache, waiting, order = PageSet(num_pages), dict(enumerate(trace.requests)), []
    cached = [0] * len(waiting)
    while waiting:
        if (len(order) + 1) % OLDEST_EVERY[policy] == 0:
            number = min(waiting)
        else:
            number = min(waiting, key=lambda n: (cost(cache, waiting[n], policy), n))
        request = waiting.pop(number)
        cached[number] = cache.find(request) * BLOCK_TOKENS
        cache.serve(number, request)
        order.append(number)
    return order, cached


def cost(cache: PageSet, request: TraceRequest, policy: str) -> int:
    uncached = symbols(request) - cache.find(request) * PER_PAGE
    return {"lpm": uncached - symbols(request), "suf": uncached, "fcfs": 0}[policy]


def check(trace: Trace, num_pages: int, policy: SchedulePolicyName) -> None:
    together = [
        TraceRequest(0.0, r.input_tokens, r.output_tokens, r.blocks)
        for r in trace.requests
        if r.input_tokens + 4096 <= num_pages * BLOCK_TOKENS
    ]
    trace = Trace(trace.name, together)
    run = replay(trace, Setup(num_pages * BLOCK_TOKENS, schedule_policy=policy, max_running=1))
    order, cached = simulate(trace, num_pages, policy)
    assert run.order == order
    assert run.cached_tokens == cached
    assert sum(cached) > 0 and run.evicted_tokens > 0


@pytest.fixture(autouse=True)
def plain_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated cache evicts by use alone, without regard to the queue."""
    monkeypatch.setitem(POLICIES, "lru", lambda clock: least_recently_used())


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lookups as it takes: how many a pick may do is bounded, and so is how well it
    knows."""
    monkeypatch.setattr(waiting_queue, "LOOKUPS_PER_PICK", 10**6)
    monkeypatch.setattr(waiting_queue, "LOOKUPS_PER_STEP", 10**6)


MADE_UP = [(60, "lpm"), (60, "suf"), (200, "fcfs")]
RECORDED = [("conversation_first60", "lpm"), ("synthetic", "fcfs"), ("agent_dev", "suf")]


def with_every_policy(cases: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    return [(case, policy) for case in dict(cases) for policy in OLDEST_EVERY]


@pytest.mark.parametrize(
    ("num_pages", "policy"), with_every_policy(MADE_UP) if IN_FULL else MADE_UP
)
def test_replay_of_a_made_up_crowd_has_the_exact_order_and_hits(
    num_pages: int, policy: SchedulePolicyName
) -> None:
    check(conversations(2, 150 if IN_FULL else 70, num_users=15), num_pages, policy)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not in this checkout")
@pytest.mark.parametrize(("name", "policy"), with_every_policy(RECORDED) if IN_FULL else RECORDED)
def test_replay_of_a_recorded_crowd_has_the_exact_order_and_hits(
    name: str, policy: SchedulePolicyName
) -> None:
    check(read_trace(TRACES / f"{name}.jsonl.gz", limit=150 if IN_FULL else 60), 512, policy)
