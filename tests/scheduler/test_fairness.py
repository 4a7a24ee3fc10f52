"""Tenants beside each other in one engine: they learn nothing of each other's prompts, and take
turns."""

import msgspec
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import NO_HINTS, CacheHints, RequestOptions, Retention, Tenant
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.invariants import check_invariants
from tests.batches import started
from tests.scheduler.engine_model import EngineModel, limits

ALICE, BOB = (Tenant(name=name, cache_namespace=f"key:{name}") for name in ("alice", "bob"))
PROMPT = [i % 40 + 8 for i in range(100)]


def prefilled(
    engine: EngineModel, tenant: Tenant, prompt: list[int], salt: str = ""
) -> tuple[int, int, int]:
    """Tokens of a prompt that were computed, found in the cache, and the number of steps until the
    first token."""
    steps, tokens = len(engine.plans), sum(c.num_tokens for p in engine.plans for c in p.prefill)
    seq_id = engine.add(prompt, max_tokens=1, tenant=tenant, salt=salt)
    engine.run()
    computed = sum(c.num_tokens for p in engine.plans for c in p.prefill) - tokens
    return computed, engine.cached[seq_id], len(engine.plans) - steps


@pytest.mark.parametrize("salt", ["", "s", "key:alice\0", "\0key:alice\0"])
def test_a_tenant_learns_nothing_of_anothers_prompts(salt: str) -> None:
    empty = EngineModel(limits(num_pages=200))
    engine = EngineModel(limits(num_pages=200))
    for own in ("", "s"):
        prefilled(engine, ALICE, PROMPT, own)
    of_stranger = prefilled(engine, BOB, PROMPT, salt)
    assert of_stranger == prefilled(empty, BOB, PROMPT, salt)
    assert of_stranger[:2] == (100, 0)
    assert prefilled(engine, ALICE, PROMPT)[:2] == (4, 96)  # the cache does work


def test_tenants_of_one_group_share_prefixes() -> None:
    engine = EngineModel(limits(num_pages=200))
    carol, dave = (Tenant(name=name, cache_namespace="group:friends") for name in ("carol", "dave"))
    prefilled(engine, carol, PROMPT)
    assert prefilled(engine, dave, PROMPT)[1] == 96


GREEDY = [
    NO_HINTS,
    CacheHints(retain=[Retention("high")]),
    CacheHints(next_use_s=0.001),
]


@pytest.mark.parametrize("hints", GREEDY, ids=("plain", "retained", "soon"))
@pytest.mark.parametrize("share", [None, 0.25])
def test_a_tenant_above_its_share_of_the_cache_loses_its_own_pages_first(
    share: float | None, hints: CacheHints
) -> None:
    engine = EngineModel(limits(num_pages=200))
    greedy = msgspec.structs.replace(ALICE, max_cached_fraction=share)
    prefilled(engine, BOB, PROMPT)
    for number in range(20):
        engine.add([100 + number, *PROMPT[1:]], max_tokens=1, tenant=greedy, cache_hints=hints)
        engine.run()
        check_invariants(engine.scheduler)
    assert prefilled(engine, BOB, PROMPT)[1] == (0 if share is None else 96)
    cached = prefilled(engine, greedy, [119, *PROMPT[1:]])[1]
    assert cached == 96, "its last prompt is still there"
    others = engine.scheduler.state.kv.tree.shares.for_namespace(BOB.cache_namespace).num_pages
    assert engine.scheduler.state.kv.tree.num_pages - others > 0.25 * 200, (
        "free memory is anybody's"
    )


# ------------------------------------------------------------ the virtual token counter


def steps_to_first_token(engine: EngineModel, prompt: list[int]) -> int:
    """Of a new request of Bob's."""
    seq_id = engine.add(prompt, 4, tenant=BOB)
    for step in range(1, 200):
        while len(engine.sent) < 2 and engine.plan() is not None:
            pass
        if seq_id in started(engine.absorb()):
            check_invariants(engine.scheduler)
            return step
    raise AssertionError("there was no token in 200 steps")


def prompt_of(number: int, length: int) -> list[int]:
    """No two numbers share a prefix."""
    return [number % 40 + 8, number // 40 + 8, *([9] * (length - 2))]


@pytest.mark.parametrize("policy", ["lpm", "suf", "fcfs", "priority"])
@pytest.mark.parametrize(
    ("num_running", "num_pages", "max_tokens"),
    [(200, 4000, 2), (4, 4000, 60), (200, 150, 100)],
    ids=["the prefill budget", "slots", "pages"],
)
def test_a_tenant_that_begins_to_ask_waits_at_most_twice_as_long_as_alone(
    policy: str, num_running: int, num_pages: int, max_tokens: int
) -> None:
    """100 requests of another wait, for want of the prefill budget, of slots or of pages."""
    setup = limits(
        schedule_policy=policy, max_running_requests=num_running, num_pages=num_pages,
        max_prefill_tokens=40, chunked_prefill_size=40,
    )  # fmt: skip
    alone = steps_to_first_token(EngineModel(setup), prompt_of(999, 60))
    engine = EngineModel(setup)
    for number in range(140):
        engine.add(prompt_of(number, 60), max_tokens, tenant=ALICE, ignore_eos=True)
    for _ in range(40):
        engine.plan()
        engine.absorb()
    assert len(engine.scheduler.state.waiting) >= 100
    assert steps_to_first_token(engine, prompt_of(999, 60)) <= 2 * alone


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_waiting_tenants_get_tokens_in_proportion_to_their_weights(
    weight: float, share: float
) -> None:
    alice = Tenant(name="alice", cache_namespace="key:alice", weight=weight)
    engine = EngineModel(limits(num_pages=4000, max_prefill_tokens=40, max_running_requests=6))
    tenants = {}
    for number in range(200):
        tenants[engine.add(prompt_of(number, 30), 8, tenant=alice, ignore_eos=True)] = "alice"
    for number in range(200, 300):  # long prompts, short answers: tokens are what counts
        tenants[engine.add(prompt_of(number, 90), 1, tenant=BOB, ignore_eos=True)] = "bob"
    accounts = engine.scheduler.state.waiting.accounts
    served = {}
    for _ in range(120):
        engine.plan()
        engine.absorb()
    for tenant in (alice, BOB):
        account = accounts.for_tenant(tenant)
        served[tenant.name] = account.prompt_tokens + 2 * account.output_tokens
    assert served["alice"] / sum(served.values()) == pytest.approx(share, abs=0.03)
    assert len(engine.scheduler.state.waiting) > 0


def test_a_tenant_cannot_fill_the_queue_of_another() -> None:
    engine = EngineModel(limits(max_queued_requests=20))
    refused = {ALICE.name: 0, BOB.name: 0}
    for tenant in (ALICE, BOB, ALICE):
        for number in range(30):
            options = RequestOptions(sampling=SamplingParams(max_tokens=1), tenant=tenant)
            seq_id, prompt = len(engine.scheduler.state.waiting), pack_ids(prompt_of(number, 10))
            request = SequenceRequest(seq_id=seq_id, token_ids=prompt, options=options)
            refused[tenant.name] += engine.scheduler.add(request) is not None
    assert refused == {"alice": 10 + 30, "bob": 20}


def test_idle_time_earns_nothing() -> None:
    """A tenant that was away does not get the engine for itself when it comes back."""
    engine = EngineModel(limits(num_pages=4000, max_prefill_tokens=40, max_running_requests=6))
    engine.add(prompt_of(0, 30), 1, tenant=BOB)
    engine.run()
    for number in range(1, 150):
        engine.add(prompt_of(number, 30), 1, tenant=ALICE)
    for _ in range(40):
        engine.plan()
        engine.absorb()
    accounts = engine.scheduler.state.waiting.accounts
    before = {tenant.name: accounts.for_tenant(tenant).prompt_tokens for tenant in (ALICE, BOB)}
    for number in range(150, 250):
        engine.add(prompt_of(number, 30), 1, tenant=BOB)
    for _ in range(40):
        engine.plan()
        engine.absorb()
    got = {
        tenant.name: accounts.for_tenant(tenant).prompt_tokens - before[tenant.name]
        for tenant in (ALICE, BOB)
    }
    assert abs(got["alice"] - got["bob"]) <= 60  # two prompts


def test_the_order_of_one_tenant_is_that_of_an_engine_of_its_own() -> None:
    """Longest prefix first among its own, whatever others do in between."""
    orders = []
    for others in (0, 60):
        engine = EngineModel(limits(num_pages=4000, max_prefill_tokens=20, max_running_requests=64))
        for document in range(4):
            engine.add([document + 8] * 40, 1, tenant=ALICE)
        engine.run()
        for i in range(40):
            engine.add([*[i % 4 + 8] * (10 * (i % 5)), i % 7, 50, i], 1, tenant=ALICE)
        for number in range(others):
            engine.add(prompt_of(number, 30), 1, tenant=BOB)
        engine.run()
        admitted = [
            unpack_ids(admit.token_ids).tolist() for plan in engine.plans for admit in plan.admit
        ]
        orders.append([prompt for prompt in admitted if 50 in prompt])
    assert orders[0] == orders[1] and len(orders[0]) == 40


def test_a_tenant_keeps_its_last_sequence_and_answers_are_not_changed() -> None:
    """Three tenants on two slots: retractions for others do not go round in circles."""
    carol = Tenant(name="carol", cache_namespace="key:carol")
    engine = EngineModel(limits(num_pages=4000, max_running_requests=2))
    for number in range(12):
        tenant = (ALICE, BOB, carol)[number // 4]
        engine.add(prompt_of(number, 20), 20, tenant=tenant, ignore_eos=True)
    engine.run()  # compares every answer with that of an undisturbed model
    assert engine.scheduler.state.counters.retractions <= 2


def test_a_long_prompt_waits_at_most_twice_as_long_as_alone_beside_shorter_ones_of_another() -> (
    None
):
    """Beside four partly computed prompts, only shorter ones are admitted."""
    setup = limits(
        max_running_requests=200, num_pages=4000, max_prefill_tokens=16, chunked_prefill_size=16
    )
    alone = steps_to_first_token(EngineModel(setup), prompt_of(999, 200))
    engine = EngineModel(setup)
    for number in range(30):
        engine.add(prompt_of(number, 160), 2, tenant=ALICE, ignore_eos=True)
    for _ in range(6):
        engine.plan()
        engine.absorb()
    assert steps_to_first_token(engine, prompt_of(999, 200)) <= 2 * alone
