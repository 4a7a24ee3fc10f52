"""Turns of an agent with a hybrid model whose template begins an answer with ``<think>`` and
drops the reasoning of earlier answers, so that each prompt leaves the one before at its end."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tests import agent_turns
from tests.agent_turns import AGENTS
from tests.api.test_agent_turns import FORGETFUL
from tests.clients.checkpoint import make_agent_checkpoint
from tests.servers.servers_in_process import serving_in_process

NUM_TURNS = 20 if "RADIXRT_TURNS" in os.environ else 8
"""``make test-turns`` takes twenty."""
CACHED_SHARE = 0.98
EXTRA: dict[str, Any] = {
    "max_reasoning_tokens": 20,
    "seed": 1,
    "logit_bias": {"0": -100, "1": -100},
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.mark.parametrize("architecture", ["qwen3_5"])
def test_a_turn_finds_the_prompt_of_the_turn_before(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_turns, "SYSTEM", agent_turns.SYSTEM * 6)
    model = make_agent_checkpoint(tmp_path, FORGETFUL, architecture)
    with serving_in_process(model, reasoning_parser="qwen3", max_total_tokens=65536) as running:
        turns = list(itertools.islice(AGENTS["chat"](running.url, "tiny", EXTRA), NUM_TURNS))
    for before, turn in itertools.pairwise(turns):
        assert turn.cached >= CACHED_SHARE * before.prompt
