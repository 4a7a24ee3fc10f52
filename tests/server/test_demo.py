"""The built-in model through its server, as a newcomer meets it."""

import contextlib
import json
import re
from pathlib import Path

import httpx
import pytest

from tests.command_line import run_program
from tests.servers import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def base_url(demo_server: Server) -> str:
    return f"{demo_server.url}/v1"


def run(script: str, *flags: str) -> str:
    return run_program(EXAMPLES / script, *flags)


def test_it_answers_about_what_it_never_saw(base_url: str, tmp_path: Path) -> None:
    """A few conversations a task, so the bars are lower than those of `make eval-demo`."""
    results = tmp_path / "results.json"
    flags = ["--base-url", base_url, "--asked", "5", "--free-json", "--json", str(results)]
    with contextlib.suppress(SystemExit):  # its own bars are missed
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


def progress_of(base_url: str, path: str, body: dict) -> tuple[list[dict], str]:
    """The reports of a prompt's progress in a stream, and the text that follows them."""
    reports, text = [], ""
    body = {**body, "stream": True, "return_progress": True, "temperature": 0, "max_tokens": 4}
    with httpx.stream("POST", f"{base_url}/{path}", json=body, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    for event in map(json.loads, lines):
        (choice,) = event["choices"]
        if (report := event.get("prompt_progress")) is not None:
            assert not text, "the prompt is complete when its answer begins"
            reports.append(report)
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return reports, text


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_tells_the_progress_of_its_prompt_as_llama_cpp_does(
    base_url: str, path: str
) -> None:
    """The first report has the cached tokens alone, the last one the whole prompt."""
    text = f"{path} " + " ".join(f"The owner of Vidur{i} is Noval." for i in range(100))
    chat = path.startswith("chat")
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    cold, first = progress_of(base_url, path, body)
    assert len(cold) > 3
    warm, second = progress_of(base_url, path, body)
    assert first and first == second
    for reports in (cold, warm):
        assert {report["total"] for report in reports} == {cold[0]["total"]}
        assert reports[0]["processed"] == reports[0]["cache"] == reports[-1]["cache"]
        assert reports[-1]["processed"] == reports[-1]["total"]
        processed = [report["processed"] for report in reports]
        assert processed == sorted(set(processed)), "it only grows"
        assert [r["time_ms"] for r in reports] == sorted(r["time_ms"] for r in reports)
    assert cold[0]["cache"] < 32 and warm[0]["cache"] > 0.9 * warm[0]["total"]


def test_progress_without_a_stream_is_refused(base_url: str) -> None:
    body = {"prompt": "a", "return_progress": True}
    refused = httpx.post(f"{base_url}/completions", json=body, timeout=20)
    assert refused.status_code == 400 and "set stream to true" in refused.text
