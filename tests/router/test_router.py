"""The router sends a prompt where it costs the fewest seconds."""

from collections.abc import Sequence
from functools import lru_cache

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from radixrt.kv import events
from radixrt.kv.events import (
    BlockStored,
    EventBatch,
    StatesChanged,
    block_hashes,
    namespace_hash,
    prompt_hashes,
)
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import pack_ids
from radixrt.messages.replicas import ReplicaLoad
from radixrt.router.router import EXPECTED_S, RoutedPrompt, Router

PAGE_SIZE = 4
RATE = 1e-3
"""Seconds per token."""


POOL_TOKENS = 1_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A router of replicas that report by hand."""

    def __init__(self, num_replicas: int = 2, *, has_states: bool = False) -> None:
        self.clock = Clock()
        self.router = Router(PAGE_SIZE, self.clock)
        self.sequences = [0] * num_replicas
        self.sent = [0] * num_replicas
        self.open = dict.fromkeys(range(num_replicas), 0)
        for replica in range(num_replicas):
            self.router.join(replica, has_states=has_states)
            self.report(replica)

    def report(
        self,
        replica: int,
        queued_s: float = 0.0,
        received: int = 0,
        context: int = 0,
        free: int = 0,
        partial_s: Sequence[float] = (),
    ) -> None:
        load = ReplicaLoad(
            received=received,
            step_s=queued_s,
            partial_s=list(partial_s),
            seconds_per_token=RATE,
            context_tokens=context,
            free_tokens=free,
            pool_tokens=POOL_TOKENS,
        )
        self.router.report(replica, load)

    def cache(self, replica: int, tokens: list[int], salt: str = "") -> None:
        """A replica has a prompt in its cache."""
        hashes = block_hashes(namespace_hash(CacheRoot(salt=salt)), pack_ids(tokens), PAGE_SIZE)
        event = BlockStored(
            block_hashes=hashes, parent_hash=None, token_ids=None, page_size=PAGE_SIZE, salted=False
        )
        self.tell(replica, event)

    def keep_state(self, replica: int, tokens: list[int], *, dropped: bool = False) -> None:
        """A replica has got, or lost, the state behind these tokens, which end with a block."""
        hashes = block_hashes(namespace_hash(BASE_ROOT), pack_ids(tokens), PAGE_SIZE)[
            -events.HASH_BYTES :
        ]
        kept = b"" if dropped else hashes
        self.tell(replica, StatesChanged(kept=kept, dropped=hashes if dropped else b""))

    def tell(self, replica: int, event: events.AnyEvent) -> None:
        self.sequences[replica] += 1
        batch = EventBatch(
            stream=str(replica), sequence=self.sequences[replica], timestamp=0.0, events=[event]
        )
        self.router.take_events(replica, [msgspec.msgpack.encode(batch)])

    def cached_tokens(self, tokens: list[int], salt: str = "") -> list[int]:
        return [
            found.cached_tokens for found in self.router.candidates(prompt(tokens, salt), self.open)
        ]

    def choose(self, tokens: list[int], salt: str = "") -> int:
        routed = prompt(tokens, salt)
        chosen = self.router.choose(routed, self.open)
        self.sent[chosen.replica] += 1
        self.router.send(routed, chosen, self.sent[chosen.replica])
        self.open[chosen.replica] += 1
        return chosen.replica


def prompt(tokens: list[int], salt: str = "") -> RoutedPrompt:
    return RoutedPrompt.from_tokens(pack_ids(tokens), CacheRoot(salt=salt), PAGE_SIZE)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("page_size", [1, 16, 100, 3000])
def test_remembered_hashes_are_those_of_the_whole_prompt(page_size: int) -> None:
    random = np.random.default_rng(page_size)
    packed = pack_ids(random.integers(0, 1000, 9999))
    forked = packed[:30_000] + pack_ids(random.integers(0, 1000, 1000))
    for salt in ("", "tenant"):
        for part in (packed, packed[:-4], forked, packed[:16_384], packed[:4], b""):
            assert prompt_hashes(CacheRoot(salt=salt), part, page_size) == block_hashes(
                namespace_hash(CacheRoot(salt=salt)), part, page_size
            )


def test_the_next_turn_hashes_little_more_than_its_new_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []

    def counted(before: bytes, packed: bytes, page_size: int) -> bytes:
        hashed.append(len(packed) // 4)
        return block_hashes(before, packed, page_size)

    monkeypatch.setattr(events, "_stride_hashes", lru_cache(64)(counted))
    random = np.random.default_rng(0)
    turns = random.integers(0, 1000, 20_000)
    for end in range(10_000, 20_001, 500):
        prompt_hashes(BASE_ROOT, pack_ids(turns[:end]), 16)
    assert max(hashed) == 1024 and sum(hashed) <= 20_000, "each stride once"
    assert events._stride_hashes.cache_info().maxsize, "bounded"


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@given(cached=st.lists(st.tuples(st.integers(0, 2), PROMPTS), max_size=8), asked=PROMPTS)
def test_the_depth_of_a_match_is_that_of_a_dictionary(
    cached: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    fleet, dictionary = Fleet(3), [set(), set(), set()]
    for replica, known in cached:
        fleet.cache(replica, known)
        dictionary[replica] |= {
            tuple(known[:end]) for end in range(PAGE_SIZE, len(known) + 1, PAGE_SIZE)
        }
    expected = [
        max(
            [end for end in range(0, len(asked) + 1, PAGE_SIZE) if tuple(asked[:end]) in prefixes]
            or [0]
        )
        for prefixes in dictionary
    ]
    assert fleet.cached_tokens(asked) == [min(depth, len(asked) - 1) for depth in expected]


def test_a_prompt_goes_where_its_prefix_is() -> None:
    fleet = Fleet(3)
    fleet.cache(1, tokens(40))
    fleet.cache(2, tokens(20))
    assert fleet.choose([*tokens(60)]) == 1


def test_prefixes_of_different_salts_are_different() -> None:
    fleet = Fleet(2)
    fleet.cache(1, tokens(40), "tenant")
    assert fleet.cached_tokens(tokens(41)) == [0, 0]
    assert fleet.cached_tokens(tokens(41), "tenant") == [0, 40]


def test_affinity_gives_way_to_a_long_wait() -> None:
    fleet = Fleet(2)
    fleet.cache(1, tokens(40))
    fleet.report(1, queued_s=10.0)
    assert fleet.choose(tokens(41)) == 0


def test_a_short_prompt_overtakes_long_ones_and_a_long_one_waits_for_them() -> None:
    for cached, expected in ((40, 1), (4, 0)):
        fleet = Fleet(2)
        fleet.cache(1, tokens(cached))
        fleet.report(0, free=POOL_TOKENS)
        fleet.report(1, free=POOL_TOKENS, partial_s=[10.0])
        assert fleet.choose(tokens(44)) == expected


def test_a_prompt_whose_prefix_is_being_computed_overtakes_no_part_of_it() -> None:
    fleet = Fleet(2)
    fleet.cache(0, tokens(900))
    fleet.report(0, queued_s=10.0)
    assert fleet.choose(tokens(1000)) == 1, "computed there in a second"
    fleet.report(0)
    assert fleet.choose(tokens(1004)) == 0, "a tenth of a second, and the second lasts"


def test_a_session_does_not_leave_its_pages_for_a_replica_that_computes_less() -> None:
    for cached, expected in ((960, 1), (0, 0)):
        fleet = Fleet(2)
        fleet.report(0, queued_s=100.0)
        for number in range(10):
            assert fleet.choose(tokens(1000, 10_000 + 2000 * number)) == 1
        for replica in range(2):
            fleet.report(replica, received=10, free=POOL_TOKENS)
        if cached:
            fleet.cache(1, tokens(cached))
        assert fleet.choose(tokens(1000)) == expected


def test_a_wait_passes_with_the_time() -> None:
    fleet = Fleet(2)
    fleet.cache(1, tokens(40))
    fleet.report(1, queued_s=1.0)
    fleet.clock.now += 1.0
    assert fleet.choose(tokens(41)) == 1


def test_a_prompt_waits_longer_for_its_prefix_where_computing_it_evicts_others() -> None:
    for free, expected in ((0, 1), (POOL_TOKENS, 0)):
        fleet = Fleet(2)
        fleet.cache(1, tokens(40))
        fleet.report(0, free=free)
        fleet.report(1, queued_s=0.09, free=free)
        assert fleet.choose(tokens(41)) == expected


def test_running_sequences_have_a_price() -> None:
    fleet = Fleet(2)
    fleet.report(0, context=POOL_TOKENS // 2)
    assert fleet.choose(tokens(41)) == 1


def test_forks_that_arrive_together_share_one_prefill_until_a_second_one_is_cheaper() -> None:
    """43 forks of one prefix, before any replica reports: alone, none of them would wait for
    another's prefix."""
    fleet = Fleet(4)
    chosen = [fleet.choose([*tokens(400), 1000 + fork]) for fork in range(43)]
    assert len(set(chosen)) == 1, "a suffix of one token is computed in a moment"
    fleet = Fleet(4)
    chosen = [fleet.choose([*tokens(400), *tokens(400, 1000 * fork)]) for fork in range(1, 44)]
    assert max(chosen.count(replica) for replica in range(4)) <= 1.3 * 43 / 4


def test_short_prompts_spread_though_their_first_page_is_in_one_replica() -> None:
    fleet = Fleet(4)
    chosen = [fleet.choose([*tokens(PAGE_SIZE), *tokens(4, 100 * n)]) for n in range(40)]
    assert max(chosen.count(replica) for replica in range(4)) <= 13


def test_what_was_sent_counts_until_the_replica_reports_it() -> None:
    fleet = Fleet(2)
    first = fleet.choose(tokens(100))
    assert fleet.choose(tokens(100, 1000)) == 1 - first
    fleet.report(first, received=0)  # made before the prompt arrived
    assert fleet.choose(tokens(60, 2000)) == first, "of the two, by the fewest seconds sent"
    fleet.report(first, received=2)
    assert fleet.choose(tokens(60, 3000)) == first, "its own account: nothing is queued"


def test_an_answer_counts_until_it_ends_whatever_the_replica_has_reported() -> None:
    fleet = Fleet(2)
    assert [fleet.choose(tokens(4, 100 * n)) for n in range(4)].count(0) == 2
    for replica in range(2):
        fleet.report(replica, received=2)
    fleet.open[1] = 1
    assert fleet.choose(tokens(4, 900)) == 1


def test_expected_blocks_are_forgotten_if_no_event_comes() -> None:
    fleet = Fleet(2)
    first = fleet.choose(tokens(40))
    assert fleet.cached_tokens(tokens(41))[first] == 40
    fleet.clock.now += EXPECTED_S / 2 - 0.1
    assert fleet.cached_tokens(tokens(41))[first] == 40
    for _ in range(2):
        fleet.clock.now += EXPECTED_S / 2 + 0.1
        fleet.choose(tokens(4, 900))
    assert fleet.cached_tokens(tokens(41)) == [0, 0]


def test_nothing_goes_to_a_dead_replica_and_one_that_is_back_is_empty() -> None:
    fleet = Fleet(2)
    fleet.cache(1, tokens(40))
    fleet.router.leave(1)
    assert [fleet.choose(tokens(41)) for _ in range(5)] == [0] * 5
    fleet.router.join(1)
    assert fleet.cached_tokens(tokens(41)) == [40, 0], "what was sent to 0 is there"


def test_a_pin_goes_to_the_replica_that_has_most_of_its_prompt() -> None:
    fleet = Fleet(3)
    fleet.cache(2, tokens(40))
    fleet.report(2, queued_s=100.0)
    assert fleet.router.owner(prompt(tokens(41))) == 2


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_a_replica_without_rates_yet_is_compared_by_a_guess(rate: float) -> None:
    fleet = Fleet(2)
    fleet.router.report(0, ReplicaLoad(seconds_per_token=rate, pool_tokens=POOL_TOKENS))
    costs = [found.cost_s for found in fleet.router.candidates(prompt(tokens(100)), fleet.open)]
    assert np.all(np.array(costs) > 0)


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    fleet = Fleet(2)
    for number in range(200):
        fleet.choose(tokens(40, 1000 * number))
        fleet.clock.now += 0.5
        for replica in range(2):
            fleet.report(replica, received=number + 1)
    most = 2 * EXPECTED_S / 0.5 * 10
    assert all(
        len(known.young) + len(known.old) <= most for known in fleet.router._replicas.values()
    )
    assert all(len(known.pending) <= 1 for known in fleet.router._replicas.values())


def test_pages_behind_the_last_state_of_a_hybrid_model_do_not_count() -> None:
    fleet, known = Fleet(has_states=True), tokens(40)
    fleet.cache(0, known)
    fleet.cache(1, known[:20])
    assert fleet.cached_tokens(known) == [0, 0]
    fleet.keep_state(0, known[:8])
    fleet.keep_state(1, known[:20])
    assert fleet.cached_tokens(known) == [8, 20]
    fleet.keep_state(0, known[:32])
    assert fleet.cached_tokens([*known[:30], 99]) == [8, 20]
    assert fleet.cached_tokens([*known[:35], 99]) == [32, 20]
    fleet.keep_state(1, known[:20], dropped=True)
    fleet.keep_state(0, known[:32], dropped=True)
    assert fleet.cached_tokens([*known[:35], 99]) == [8, 0]
    assert fleet.choose([*known[:35], 99]) == 0


def test_prompts_of_a_hybrid_model_that_arrive_together_share_a_replica() -> None:
    """The states of the first are expected as its pages are."""
    fleet, document = Fleet(has_states=True), tokens(4000)
    first = fleet.choose([*document, 1])
    assert fleet.choose([*document, 2]) == first
