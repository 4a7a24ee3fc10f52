"""Turns of an agent in each API, with a real model: what a turn has computed or generated, the
next turn finds in the cache.

The model is random, so its reasoning is bounded, its calls are required, and it may not write
control tokens, whose text no client could send back.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.agent_turns import AGENTS
from tests.api.conftest import RunningServer
from tests.api.test_agent_turns import FORGETFUL
from tests.clients.checkpoint import make_agent_checkpoint
from tests.servers.servers_in_process import serving_in_process

NUM_TURNS = 10 if "RADIXRT_TURNS" in os.environ else 5
"""``make test-turns`` takes ten."""
CACHED_SHARE = 0.95
BUDGET = 20
CLOSING = len("</think>")
"""Tokens of the closing tag, at most: the tokenizer has few merges."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_agent_checkpoint(tmp_path_factory.mktemp("agents"), FORGETFUL)
    settings = {"reasoning_parser": "deepseek-r1", "page_size": 4, "max_total_tokens": 65536}
    with serving_in_process(model, **settings) as running:
        yield running


@pytest.mark.parametrize("name", AGENTS)
def test_the_tokens_of_a_turn_come_from_the_cache_in_the_next(
    server: RunningServer, name: str
) -> None:
    extra: dict[str, Any] = {"max_reasoning_tokens": BUDGET, "seed": 1, "cache_salt": name}
    extra |= {"logit_bias": {"0": -100, "1": -100}}
    extra |= {"tool_choice": "required", "parallel_tool_calls": False}
    if name == "messages":
        extra["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    if name in ("chat", "ollama"):
        extra["replay_reasoning"] = True
    turns = [*itertools.islice(AGENTS[name](server.url, "tiny", extra), NUM_TURNS)]
    for before, turn in itertools.pairwise(turns):
        known = before.prompt + before.output
        assert turn.prompt > known
        assert turn.cached >= CACHED_SHARE * known
    assert all(turn.counted in (None, turn.prompt) for turn in turns)
    assert all(turn.output > BUDGET for turn in turns)


def test_the_bound_of_the_reasoning_is_exact(server: RunningServer) -> None:
    asked = {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "seed": 5,
        "max_tokens": 60,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def answer(**fields: Any) -> Any:
        response = httpx.post(f"{server.url}/v1/chat/completions", json=asked | fields, timeout=60)
        return response.json()

    free, bounded = answer(), answer(max_reasoning_tokens=BUDGET)
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60
    assert bounded["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET
    (before,), (after,) = free["choices"], bounded["choices"]
    cut = BUDGET - CLOSING
    assert len(after["token_ids"]) == 60
    assert after["token_ids"][:cut] == before["token_ids"][:cut]
    assert after["message"]["content"] and before["message"]["content"] == ""
    assert before["message"]["reasoning"].startswith(after["message"]["reasoning"][: cut // 2])
    stream = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=asked | {"max_reasoning_tokens": BUDGET, "stream": True},
        timeout=60,
    )
    assert stream.text.count('"reasoning_content"') > 3
