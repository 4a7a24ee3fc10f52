"""The built-in model through its server, as a newcomer meets it."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import children
from tests.servers import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def base_url(demo_server: Server) -> str:
    return f"{demo_server.url}/v1"


def run(script: str, *flags: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *flags]
    return children.run(command, capture_output=True, text=True, timeout=120).stdout


def test_it_answers_about_what_it_never_saw(base_url: str, tmp_path: Path) -> None:
    """A few conversations a task, so the bars are lower than those of `make eval-demo`."""
    results = tmp_path / "results.json"
    flags = ["--base-url", base_url, "--asked", "12", "--free-json", "--json", str(results)]
    run("train_demo_model/evaluate.py", *flags)
    shares = {row["name"]: row["share"] for row in json.loads(results.read_text())}
    assert set(shares) == {"qa_300", "qa_1500", "json", "label", "second_turn", "tool"}
    assert all(share >= 0.6 for share in shares.values()), shares


def test_every_turn_of_a_chat_finds_nine_tenths_of_its_prompt(base_url: str) -> None:
    output = run("multi_turn_chat.py", "--base-url", base_url)
    turns = [(int(c), int(p)) for c, p in re.findall(r"\[(\d+) of (\d+) prompt tokens", output)]
    assert len(turns) == 6
    assert min(cached / prompt for cached, prompt in turns[1:]) >= 0.9
    assert "The tower of Zekoru is 2060." in output


def test_answers_come_from_the_shared_document(base_url: str) -> None:
    output = run("rag_shared_document.py", "--base-url", base_url)
    assert "The captain of Karimo is Jelan." in output
    assert "The cargo of Fenoka is glass." in output
