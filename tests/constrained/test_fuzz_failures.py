"""Schemas that random generation once found to be compiled wrongly; see ``fuzz_schemas.py``."""

import random
from collections import Counter
from typing import Any

import pytest

from radixrt.base.config import DEMO_MODEL
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.checkpoint import resolve_model_path
from tests.constrained.fuzz_schemas import failures_of, kept_failures


@pytest.fixture(scope="module")
def facts() -> TokenizerFacts:
    return TokenizerFacts.from_folder(resolve_model_path(DEMO_MODEL))


@pytest.mark.parametrize("kept", kept_failures(), ids=lambda kept: str(kept["schema"])[:60])
def test_a_schema_that_failed_once_accepts_only_valid_values(
    kept: dict[str, Any], facts: TokenizerFacts
) -> None:
    counts: Counter[str] = Counter()
    rng = random.Random(kept["seed"])
    assert failures_of(kept["schema"], kept["texts"], rng, facts, counts) == []
    assert counts["values valid, accepted"] + counts["values invalid, refused"] > 0
