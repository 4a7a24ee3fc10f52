"""What a lease promises, what it costs others, and where the promise ends."""

import numpy as np
import pytest

from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.calls import PinCall, ReleaseCacheCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import Tenant, TokenPrompt
from radixrt.scheduler.invariants import InvariantError, check_invariants
from radixrt.scheduler.radix.leases import Lease, Leases
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits

DOCUMENT = list(range(20))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Pinned:
    """An engine of 40 pages of 4 tokens, half of which may be pinned."""

    def __init__(self, **changes: object) -> None:
        self.clock = Clock()
        self.model = EngineModel(limits(**{"num_pages": 40, **changes}), self.clock)
        self.scheduler = self.model.scheduler
        self.tree, self.leases = self.scheduler.state.kv.tree, self.scheduler.state.kv.leases

    def run(self, prompt: list[int], max_tokens: int = 0) -> None:
        self.model.add(prompt, max_tokens)
        self.model.run()

    def pin(self, prompt: list[int], ttl_s: float = 60.0) -> Lease:
        return self.leases.pin(np.array(prompt, dtype=np.int32), BASE_ROOT, ttl_s)

    def refusal(self, prompt: list[int], ttl_s: float = 60.0) -> RequestError:
        with pytest.raises(RequestError) as refused:
            self.pin(prompt, ttl_s)
        check_invariants(self.scheduler)
        return refused.value

    def num_cached(self, prompt: list[int]) -> int:
        match = self.tree.match(np.array(prompt, dtype=np.int32))
        return 0 if match is None else match.num_pages

    def flood(self) -> None:
        """Strangers for more than the whole pool."""
        for stranger in range(6):
            self.run([100 + stranger + 10 * len(self.model.requests)] * 40)


def test_what_is_leased_outlives_every_flood_and_a_flush_until_the_lease_has_expired() -> None:
    engine = Pinned()
    engine.run(DOCUMENT)
    lease = engine.pin([*DOCUMENT, 1, 2], ttl_s=60)
    assert lease.num_pages == 5
    engine.flood()
    engine.scheduler.flush_cache()
    assert engine.num_cached(DOCUMENT) == 5 and engine.tree.num_pages == 5
    engine.clock.now += 59.5
    assert engine.leases.seconds_to_next_expiry() == 0.5
    engine.model.plan()
    assert len(engine.leases) == 1
    engine.clock.now += 0.5
    assert engine.leases.seconds_to_next_expiry() == 0.0
    engine.model.plan()  # as an idle process does when it wakes for it
    assert engine.leases.seconds_to_next_expiry() is None
    engine.flood()
    assert engine.num_cached(DOCUMENT) == 0


def test_a_released_prefix_goes_by_its_last_use_and_not_by_its_release() -> None:
    engine = Pinned()
    engine.run(DOCUMENT)
    lease = engine.pin(DOCUMENT)
    engine.run([50] * 20)
    engine.leases.release(lease.lease_id)
    engine.scheduler.state.kv.allocator.free(engine.tree.evict(5))
    assert (engine.num_cached(DOCUMENT), engine.num_cached([50] * 20)) == (0, 5)


def test_pages_under_several_leases_count_once() -> None:
    engine = Pinned()
    engine.run([*DOCUMENT, *[50] * 8])
    engine.run([*DOCUMENT, *[60] * 8])
    whole = engine.pin([*DOCUMENT, *[50] * 8])
    other = engine.pin([*DOCUMENT, *[60] * 8])
    part = engine.pin(DOCUMENT[:12])
    assert engine.scheduler.stats().pages_pinned == 5 + 2 + 2
    assert engine.scheduler.stats().leases == 3
    for lease, left in ((whole, 7), (part, 7), (other, 0)):
        engine.leases.release(lease.lease_id)
        assert engine.tree.num_pinned_pages == left
        check_invariants(engine.scheduler)


def test_a_lease_that_is_taken_twice_is_one() -> None:
    """A client that takes its leases again may not have heard of its first try."""
    engine = Pinned()
    engine.run(DOCUMENT)
    tokens = np.array(DOCUMENT, dtype=np.int32)
    for _ in range(2):
        engine.leases.pin(tokens, BASE_ROOT, 60.0, lease_id="mine")
        check_invariants(engine.scheduler)
    assert len(engine.leases) == 1 and engine.leases.release("mine").num_pages == 5
    assert engine.tree.num_pinned_pages == 0
    check_invariants(engine.scheduler)


def test_a_pin_that_is_refused_says_what_to_do() -> None:
    engine = Pinned()
    assert "Warm it first" in engine.refusal(DOCUMENT).message
    assert engine.refusal(DOCUMENT).status == 409
    for ttl_s in (3600.5, 0.0, -1.0, float("nan")):
        assert engine.refusal(DOCUMENT, ttl_s).param == "ttl_s"
    engine.run([7] * 84)
    too_long = engine.refusal([7] * 84)
    assert too_long.status == 400 and "pin a shorter prefix" in too_long.message
    engine.pin([7] * 60, ttl_s=30)
    engine.run([8] * 24)
    too_much = engine.refusal([8] * 24)
    assert (too_much.status, too_much.retry_after_s) == (429, 30)
    assert engine.pin([8] * 20).num_pages == 5, "the last that fit"
    assert engine.pin([7] * 40).num_pages == 10, "those are pinned already"
    with pytest.raises(RequestError) as unknown:
        engine.leases.release("never given")
    assert unknown.value.status == 404


@pytest.mark.parametrize("chunk", [8, 32])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_leases_are_broken_one_by_one_before_a_lone_request_stands_still(
    fraction: float, chunk: int
) -> None:
    engine = Pinned(
        context_length=160, max_pinned_fraction=fraction, chunked_prefill_size=chunk
    )  # one request may need all 40 pages
    for first, ttl_s in ((50, 30.0), (60, 10.0), (70, 20.0)):
        engine.run([first] * 24)
        engine.pin([first] * 24, ttl_s)
    engine.model.add([5] * 60, max_tokens=60, ignore_eos=True)  # 30 of the 22 pages that are left
    engine.model.run()
    assert engine.scheduler.stats().leases_broken == 2
    assert [engine.num_cached([first] * 24) >= 6 for first in (50, 60, 70)] == [True, False, False]
    assert engine.scheduler.state.counters.retractions == 0
    engine.model.add([6] * 100, max_tokens=60, ignore_eos=True)
    engine.model.run()
    assert engine.scheduler.stats().leases_broken == 3 and len(engine.leases) == 0


def test_leases_do_not_give_way_to_how_many_run_at_once() -> None:
    engine = Pinned(context_length=100)
    engine.run([50] * 80)
    engine.pin([50] * 80)
    for first in range(6):
        engine.model.add([first] * 20, max_tokens=30, ignore_eos=True)
    engine.model.run()
    assert len(engine.leases) == 1 and engine.num_cached([50] * 80) == 20


def test_a_request_is_refused_for_its_size_alone_whatever_is_pinned() -> None:
    engine = Pinned(max_pinned_fraction=1.0)
    engine.run([50] * 80)
    engine.pin([50] * 80)
    engine.run([1] * 100, max_tokens=60)  # fits the pool exactly
    assert len(engine.leases) == 0


def test_a_lock_that_no_lease_accounts_for_is_noticed() -> None:
    engine = Pinned()
    engine.run(DOCUMENT)
    engine.tree.pin(engine.pin(DOCUMENT).node)
    with pytest.raises(InvariantError, match="leases of a node: 2 counted"):
        check_invariants(engine.scheduler)


def test_calls_are_answered_with_values_or_with_what_to_do() -> None:
    engine, replies = Pinned(), []
    calls = engine.model.calls(replies)
    pin = PinCall(call_id=1, prompt=TokenPrompt(pack_ids(DOCUMENT)), root=BASE_ROOT, ttl_s=60.0)
    calls.take(pin)
    assert replies[-1].call_id == 1 and replies[-1].error.status == 409
    engine.run(DOCUMENT)
    calls.take(pin)
    value = replies[-1].value
    assert (value.pinned_tokens, value.expires_in_s) == (20, 60.0)
    calls.take(ReleaseCacheCall(call_id=2, lease=value.lease))
    assert replies[-1].value == 20 and len(engine.leases) == 0
    calls.take(ReleaseCacheCall(call_id=3, lease=value.lease))
    assert replies[-1].error.status == 404
    calls.take(ReleaseCacheCall(call_id=4, session="nobody"))
    assert replies[-1].value == 0


def test_a_lease_ends_in_time_while_no_further_step_may_be_planned() -> None:
    engine = Pinned()
    engine.run(DOCUMENT)
    engine.pin(DOCUMENT, ttl_s=5.0)
    engine.clock.now += 6.0
    engine.scheduler.drop_expired(now=0.0)
    assert engine.leases.seconds_to_next_expiry() is None


def test_a_lease_is_its_tenants_own_and_counts_for_its_share() -> None:
    tree = RadixTree(page_size=1)
    leases = Leases(tree, max_pages=8, clock=lambda: 0.0, pool_pages=10)
    tenants = {
        name: Tenant(name=name, cache_namespace=f"key:{name}", max_pinned_fraction=share)
        for name, share in {"alice": 0.3, "bob": 1.0}.items()
    }
    for number, tenant in enumerate(tenants.values()):
        root = tree.lock_root(tenant.root(""))
        tokens = np.arange(6, dtype=np.int32)
        tree.insert(root, tokens, tokens + 6 * number)

    def pin(name: str, length: int) -> str:
        tenant = tenants[name]
        tokens = np.arange(length, dtype=np.int32)
        return leases.pin(tokens, tenant.root(""), 10.0, tenant=tenant).lease_id

    first = pin("alice", 2)
    pin("alice", 3)  # of which two are pinned already
    with pytest.raises(RequestError, match="key may pin") as refused:
        pin("alice", 4)
    assert refused.value.status == 429
    pin("bob", 5)
    with pytest.raises(RequestError) as refused:
        pin("bob", 6)  # of the pool, eight may be pinned by all
    assert refused.value.status == 429 and "3" not in refused.value.message
    with pytest.raises(RequestError) as refused:
        leases.release(first, tenants["bob"])
    with pytest.raises(RequestError) as unknown:
        leases.release("no lease", tenants["bob"])
    assert refused.value.status == 404 and refused.value.message == unknown.value.message
    leases.release(first, tenants["alice"])
