"""Tenants beside each other in one engine: they learn nothing of each other's prompts."""

import pytest

from radixrt.messages.requests import Tenant
from tests.scheduler.engine_model import EngineModel, limits

ALICE, BOB = (Tenant(name=name, cache_namespace=f"key:{name}") for name in ("alice", "bob"))
PROMPT = [i % 40 + 8 for i in range(100)]


def prefilled(
    engine: EngineModel, tenant: Tenant, prompt: list[int], salt: str = ""
) -> tuple[int, int, int]:
    """Tokens of a prompt that were computed, found in the cache, and the number of steps until the first token."""
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
