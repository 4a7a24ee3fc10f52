"""``radixrt lint-prompts`` on logs with known faults: the same log without the fault is the oracle
of what it costs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixrt.cli.lint.report import Report
from radixrt.cli.main import main
from tests.checkpoints.tiny_tokenizers import save_byte_level

PAGE = 4
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if stamp and loop.last %}[last] {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
RULES = "You are a careful assistant who answers in the words of the quick brown fox."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
def lint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(lines: list[Any], *flags: str) -> Report:
        log = tmp_path / "log.jsonl"
        log.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))  # fmt: skip
        command = ["lint-prompts", str(log), "--model-path", str(model), "--page-size", str(PAGE), "--json"]  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main([*command, *flags])
        assert end.value.code == 0
        return msgspec.json.decode(capsys.readouterr().out, type=Report)

    return run


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """The system message, then messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"messages": [{"role": "system", "content": RULES}, *turns], **fields}


def dated(day: int) -> dict[str, Any]:
    request = chat("Who jumps over the lazy dog?")
    request["messages"][0]["content"] = f"Today is 2026-11-{day}. {RULES}"
    return request


def with_tools(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    return chat("Who jumps over the lazy dog?", tools=tools)


def stamped(stamp: bool) -> list[dict[str, Any]]:
    kwargs = {"chat_template_kwargs": {"stamp": stamp}}
    question, answer = "Who jumps over the lazy dog?", "The fox jumps over it."
    return [chat(question, **kwargs), chat(question, answer, "Sure?", **kwargs)]


@pytest.mark.parametrize(
    ("cause", "faulty", "mended", "lines"),
    [
        ("volatile_text", [dated(d) for d in range(20, 26)], [dated(20)] * 6, [2, 3, 4, 5, 6]),
        ("tools_changed", [with_tools("fox", "dog"), with_tools("dog", "fox")], [with_tools("fox", "dog")] * 2, [2]),
        ("template_rewrote_history", stamped(True), stamped(False), [2]),
        ("other_salt", [chat("Hi", cache_salt=s) for s in "ab"], [chat("Hi", cache_salt="a")] * 2, [2]),
    ],
)  # fmt: skip
def test_a_fault_costs_what_the_mended_log_saves(
    lint: Any, cause: str, faulty: list[Any], mended: list[Any], lines: list[int]
) -> None:
    report, without = lint(faulty), lint(mended)
    group = report.groups[0]
    assert (group.cause, group.lines) == (cause, lines) and group.advice
    assert without.lost_tokens == 0
    saved = without.cached_tokens - report.cached_tokens
    assert saved > 0
    # The mended template writes fewer tokens, and of a changed last message the end is not counted.
    assert saved - len(lines) * 5 * PAGE <= report.lost_tokens <= saved + PAGE
    if cause == "other_salt":
        assert report.lost_tokens == saved


def test_a_small_cache_evicts(lint: Any) -> None:
    requests = [chat(f"{name}?" + " The fox!" * 8) for name in ("Dog", "Bear", "World")] * 2
    large, small = lint(requests), lint(requests, "--cache-tokens", "160")
    assert {group.cause for group in large.groups} <= {"never_seen", "page_rounding", "none"}
    evicted = next(group for group in small.groups if group.cause == "evicted")
    assert evicted.lost_tokens == large.cached_tokens - small.cached_tokens == small.lost_tokens > 0


def test_a_growing_chat_loses_nothing(lint: Any) -> None:
    texts = ["Who are you?", "The fox.", "Sure?", "Yes, of course.", "Not the bear?", "No.", "Why?"]
    report = lint([chat(*texts[:end]) for end in (1, 3, 5, 7)])
    assert [(group.cause, group.lost_tokens) for group in report.groups] == [("never_seen", 0)]
    last = lint([chat(*texts[:end]) for end in (1, 3, 5)])
    new = report.prompt_tokens - last.prompt_tokens - (report.cached_tokens - last.cached_tokens)
    assert new < 40, "the last turn computes its new message, and no more"


def test_forms_of_lines_and_the_measured_rate(lint: Any) -> None:
    usage = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 100}}
    batch = {"custom_id": "1", "url": "/v1/chat/completions", "body": dated(21), "response": {"body": {"usage": usage, "times": {"prefill_s": 0.5}}}}  # fmt: skip
    lines = [
        dated(20), batch, {"prompt": "The fox"}, {"input": "The fox", "instructions": "Be brief."},
        {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        {"hash_ids": [1]}, "nonsense", {"messages": [{"role": "king", "content": "Hi"}]},
    ]  # fmt: skip
    report = lint(lines)
    assert report.requests == 5 and list(report.unreadable) == [6, 7, 8]
    assert "hashes" in report.unreadable[6] and "king" in report.unreadable[8]
    assert report.prefill_tokens_per_second == 400
    assert report.lost_seconds == report.lost_tokens / 400 > 0
    assert lint(lines, "--prefill-tokens-per-second", "100").lost_seconds == report.lost_tokens / 100  # fmt: skip
    assert lint([dated(20), dated(21)]).lost_seconds is None


def test_the_report_for_people_names_lines_and_advice(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(dated(day)) for day in (20, 21)))
    with pytest.raises(SystemExit):
        main(["lint-prompts", str(log), "--model-path", str(model)])
    told = capsys.readouterr().out
    assert "volatile_text" in told and "line 2" in told and "behind the text that stays" in told
    missing = str(tmp_path / "none")
    with pytest.raises(SystemExit) as end:
        main(["lint-prompts", missing, "--model-path", str(model)])
    assert end.value.code == 1 and "Can't read" in capsys.readouterr().err


def test_odd_lines_are_skipped_and_named(lint: Any) -> None:
    usage = {"prompt_tokens": None, "prompt_tokens_details": 5}
    deep = "[" * 100_000 + "]" * 100_000
    odd = [f'{{"messages": {deep}}}', {"prompt": [10**30]}, {"prompt": [1, "a"]}]
    report = lint([*odd, *({**chat("hi"), "response": each} for each in (5, {"usage": usage}))])
    assert sorted(report.unreadable) == [1, 2, 3] and report.requests == 2
    assert "deeply" in report.unreadable[1] and "vocabulary" in report.unreadable[2]


def test_the_prefill_rate_is_measured_where_responses_tell_it(lint: Any) -> None:
    told = {
        "usage": {"prompt_tokens": 50, "prompt_tokens_details": {"cached_tokens": 10}},
        "times": {"prefill_s": 0.5},
    }
    broken = {"usage": {"prompt_tokens": "many"}, "times": {"prefill_s": -1}}
    report = lint([{**chat("hi"), "response": each} for each in (told, {"body": told}, broken)])
    assert report.prefill_tokens_per_second == 80
