"""The facts about where prompts leave the radix tree, against a search through the token lists of
all sequences before."""

import random
from typing import Any

import numpy as np
import pytest

from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import CacheHints, Retention, Tenant
from radixrt.scheduler.radix.divergence import MAX_REMEMBERED
from radixrt.scheduler.radix.ghosts import Ghost, GhostList
from tests.scheduler.engine_model import EngineModel, limits

PAGE = 4


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def ask(model: EngineModel, prompt: list[int], max_tokens: int = 3, **options: Any) -> CacheFacts:
    """Run one request; returns its facts."""
    seq_id = model.add(prompt, max_tokens, **options)
    model.run()
    facts = model.scheduler.recent_facts.find(seq_id)
    assert facts is not None and facts.cached_tokens == model.cached[seq_id]
    return facts


def sequence(model: EngineModel, seq_id: int) -> list[int]:
    return unpack_ids(model.requests[seq_id].token_ids).tolist() + model.answers[seq_id]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_leave_the_tree_where_the_token_lists_differ(seed: int) -> None:
    """Only the tokens after the last full page may be less: each node remembers those of its last
    sequence."""
    dice = random.Random(seed)
    model = EngineModel(limits(num_pages=2000))
    for _ in range(80):
        earlier = [sequence(model, seq_id) for seq_id in model.requests]
        prompt = dice.choice(earlier)[: dice.randint(1, 90)] if earlier and dice.random() < 0.8 else []  # fmt: skip
        prompt = prompt + [dice.randrange(8, 11) for _ in range(dice.randint(1, 12))]
        facts = ask(model, prompt, cache_hints=CacheHints(explain=True))
        seen = max((common(prompt, other) for other in earlier), default=0)
        assert facts.reusable_tokens == len(prompt) - 1
        assert facts.cached_tokens <= facts.seen_tokens <= seen < facts.seen_tokens + 2 * PAGE
        if facts.cached_ids and facts.seen_tokens == seen:
            after = [other[seen:] for other in earlier if common(prompt, other) == seen]
            cached = unpack_ids(facts.cached_ids).tolist()
            assert any(common(cached, other) == min(len(cached), len(other)) for other in after)
        assert facts.evicted is None and facts.other_salt_tokens == 0
        nearest = sequence(model, facts.seq_id) if facts.seq_id >= 0 else []
        assert common(prompt, nearest) >= facts.cached_tokens


def test_an_eviction_is_remembered_until_its_prefix_is_evicted_too() -> None:
    now = [100.0]
    model = EngineModel(limits(num_pages=20), clock=lambda: now[0])
    old = [9] * 33
    ask(model, old)
    now[0] += 5
    ask(model, [10] * 60)
    now[0] += 2
    facts = ask(model, old)
    assert facts.evicted is not None and facts.evicted.rule == "value"
    assert facts.evicted.seconds_ago == pytest.approx(2)
    assert 0 < facts.cached_tokens < 32
    assert ask(model, [11] * 9).evicted is None


@pytest.mark.parametrize(("retain", "rule"), [("none", "retain=none"), ("high", "retain=high")])
def test_the_rule_of_an_eviction(retain: Any, rule: str) -> None:
    model = EngineModel(limits(num_pages=20))
    ask(model, [9] * 33, cache_hints=CacheHints(retain=[Retention(retain)]))
    ask(model, [10] * 75)
    found = ask(model, [9] * 33).evicted
    assert found is not None and found.rule == rule


def test_another_adapter_is_told_from_another_salt() -> None:
    info = AdapterInfo(name="a", digest="a", path="", place=0)
    adapters: Any = {"adapters": (info,), "num_adapter_places": 1}
    model, prompt = EngineModel(limits(num_pages=200, **adapters)), list(range(8, 48))
    ask(model, prompt, adapter="a")
    base = ask(model, prompt)
    assert (base.cached_tokens, base.other_adapter_tokens, base.other_salt_tokens) == (0, 36, 0)
    salted = ask(model, prompt, salt="a")
    assert (salted.other_adapter_tokens, salted.other_salt_tokens) == (0, 36)


def test_only_the_salts_of_the_same_key_are_told() -> None:
    model = EngineModel(limits(num_pages=200))
    alice, bob = (Tenant(name=name, cache_namespace="friends") for name in ("alice", "bob"))
    prompt = list(range(8, 48))
    ask(model, prompt, salt="a", tenant=alice)
    assert ask(model, prompt, salt="b", tenant=bob).other_salt_tokens == 0
    assert ask(model, prompt, salt="c", tenant=alice).other_salt_tokens == 36
    stranger = Tenant(name="alice", cache_namespace="others")
    assert ask(model, prompt, salt="a", tenant=stranger).other_salt_tokens == 0


def test_in_a_wide_tree_the_nearest_of_all_is_found_if_the_client_asks() -> None:
    model = EngineModel(limits(num_pages=3000))
    ask(model, [8, 8, 8, 8, 20, 21, 22, 23])
    for number in range(100):
        ask(model, [8, 8, 8, 8, 9, 9 + number % 20, 9 + number // 20, 9], max_tokens=1)
    prompt = [8, 8, 8, 8, 20, 21, 30, 30, 30]
    assert ask(model, prompt, cache_hints=CacheHints(explain=True)).seen_tokens == 6


def test_what_is_remembered_is_bounded() -> None:
    ghosts = GhostList(most=10)
    for number in range(50):
        ghosts.add(number % 7, bytes([number]), Ghost(float(number), "lru"))
    assert len(ghosts) == 10
    kept = [n for n in range(50) if ghosts.find(n % 7, bytes([n])) is not None]
    assert len(kept) == 10
    ghosts.forget_below(range(7))
    assert len(ghosts) == 0 and ghosts.find(49 % 7, bytes([49])) is None

    model = EngineModel(limits(num_pages=40))
    for number in range(200):
        ask(model, [number % 13 + 8] * 4 + [number // 13 + 8] * 8)
    assert 0 < len(model.scheduler.state.kv.tree.ghosts) <= 2 * 40
    recent = model.scheduler.recent_facts
    for number in range(MAX_REMEMBERED + 5):
        recent.keep(number, CacheFacts(reusable_tokens=1))
    assert recent.find(4) is None and recent.find(5) is not None


def test_eviction_of_random_traffic_keeps_only_reachable_ghosts() -> None:
    dice = random.Random(3)
    model = EngineModel(limits(num_pages=60))
    for _ in range(150):
        start = [dice.randrange(8, 11)] * (PAGE * dice.randint(1, 4))
        ask(model, start + [dice.randrange(8, 40) for _ in range(dice.randint(4, 40))])
        tree = model.scheduler.state.kv.tree
        pages = {int(page) for node in tree.nodes() for page in node.pages}
        known = tree.ghosts._below
        assert all(before in pages for before in known if isinstance(before, int))
        assert sum(map(len, known.values())) == len(tree.ghosts)
    assert np.any([facts.evicted for facts in model.scheduler.recent_facts._facts.values()])
