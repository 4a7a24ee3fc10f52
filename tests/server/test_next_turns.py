"""Turns of an agent whose template drops the thinking of earlier turns: the next turn's beginning
is computed behind each answer, in idle time."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import RunningServer
from tests.servers.servers_in_process import serving_in_process

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\nIt is in the book.\n</think>\n{% endif %}"
)
"""The thinking before an answer is not in the history, as in Qwen 3's template."""
FACTS = "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. " * 2
TURNS, ANSWER_TOKENS = 10 if "RADIXRT_TURNS" in os.environ else 5, 64
"""``make test-turns`` takes ten."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template: Path = tmp_path_factory.mktemp("template") / "drops_thinking.jinja"
    template.write_text(TEMPLATE)
    with serving_in_process("demo", chat_template=str(template), idle_share=1.0) as one:
        yield one


def turns(server: RunningServer, *, prepares: bool, salt: str) -> list[tuple[int, str]]:
    """Tokens computed at the start of each turn, and its answer."""
    messages: list[dict[str, Any]] = []
    found = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{turn}. {FACTS}What is the port?"})
            body = {
                "messages": messages,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "cache_salt": salt,
                "cache": {"next_turn": prepares},
            }
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            text = answer["choices"][0]["message"]["content"]
            found.append((usage["prompt_tokens"] - cached, text))
            messages.append({"role": "assistant", "content": text})
            if prepares:
                _wait_until_idle(client)
    return found


def _wait_until_idle(client: httpx.Client) -> None:
    """Until the work behind an answer is done."""
    before = -1
    while (now := client.get("/get_server_info").json()["stats"]["idle_tokens"]) != before:
        before = now
        time.sleep(0.15)


def test_the_next_turn_begins_in_the_cache_and_answers_alike(server: RunningServer) -> None:
    without = turns(server, prepares=False, salt="without")
    ahead = turns(server, prepares=True, salt="ahead")
    assert [text for _, text in ahead] == [text for _, text in without]
    print("computed at the start of a turn", [n for n, _ in without], [n for n, _ in ahead])
    saved = [n - m for (n, _), (m, _) in zip(without[1:], ahead[1:], strict=True)]
    assert all(n >= ANSWER_TOKENS - 16 for n in saved), "the answers were computed ahead"
