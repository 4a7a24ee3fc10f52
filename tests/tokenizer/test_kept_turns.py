"""Which answers a later request of a chat repeats as they were written."""

import tracemalloc
from typing import Any

import pytest

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.message import ToolCall
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.prompt import kept_turns
from radixrt.tokenizer.prompt.kept_turns import AnswerParts, History, KeptTurns, OpenTurn

ASK = {"role": "user", "content": "Where?"}
TOLD = {"role": "assistant", "content": "There."}


def prompt_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    return ChatPrompt([*messages], replay_reasoning=True, **fields)


def keep(turns: KeptTurns, prompt: ChatPrompt, text: str, written: str) -> None:
    history = History(prompt, CacheRoot(salt="salt"))
    found = turns.last(history, len(prompt.messages))
    parts = AnswerParts(["There."], ["Look."])
    OpenTurn(turns, history, text, found and found[1]).keep(written, parts)


def texts(turns: KeptTurns, prompt: ChatPrompt, salt: str = "salt") -> list[str]:
    found = turns.last(History(prompt, CacheRoot(salt=salt)), len(prompt.messages))
    return [] if found is None else [turn.text for turn in found[1].chain()]


@pytest.fixture
def turns() -> KeptTurns:
    made = KeptTurns()
    keep(made, prompt_of(ASK), "ask:", "(Look.)There.")
    keep(made, prompt_of(ASK, TOLD, ASK), "ask:(Look.)There.again:", "(Look.) There.")
    return made


def test_the_last_answer_brings_those_before_it(turns: KeptTurns) -> None:
    whole = ["ask:(Look.)There.", "again:(Look.) There."]
    assert texts(turns, prompt_of(ASK, TOLD, ASK, TOLD, ASK)) == whole
    spaced = {**TOLD, "content": " There.\n", "reasoning_content": "Look."}
    assert texts(turns, prompt_of(ASK, spaced, ASK, spaced)) == whole
    unknown = {**TOLD, "content": "Here."}
    assert texts(turns, prompt_of(ASK, TOLD, ASK, unknown, ASK)) == whole[:1]


@pytest.mark.parametrize(
    "prompt",
    [
        prompt_of(ASK),
        prompt_of({**ASK, "content": "When?"}, TOLD, ASK),
        prompt_of(ASK, {**TOLD, "reasoning_content": "Guess."}, ASK),
        prompt_of(ASK, {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, ASK),
        prompt_of(ASK, TOLD, ASK, tools=[{"type": "function", "function": {"name": "f"}}]),
        prompt_of(ASK, TOLD, ASK, template_kwargs={"enable_thinking": False}),
    ],
)
def test_another_chat_has_none(turns: KeptTurns, prompt: ChatPrompt) -> None:
    assert texts(turns, prompt) == []


def test_another_salt_has_none(turns: KeptTurns) -> None:
    assert texts(turns, prompt_of(ASK, TOLD, ASK), "other") == []


def test_calls_count_by_name_and_arguments() -> None:
    turns, parts = KeptTurns(), AnswerParts()
    parts.add("", "", [ToolCall(0, "f", '{"a": 1, ')])
    parts.add("", "", [ToolCall(0, "", '"b": 2}')])
    OpenTurn(turns, History(prompt_of(ASK), CacheRoot(salt="salt")), "ask:", None).keep(
        "f(1, 2)", parts
    )
    call = {"id": "any", "function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    assert texts(turns, prompt_of(ASK, {"role": "assistant", "content": "", "tool_calls": [call]}))
    call = {"function": {"name": "f", "arguments": {"b": 2, "a": 3}}}
    told = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert texts(turns, prompt_of(ASK, told)) == []


def test_kept_turns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_turns, "CAPACITY_BYTES", 5000)
    turns = KeptTurns()
    asks = [{"role": "user", "content": str(number)} for number in range(40)]
    for ask in asks:
        keep(turns, prompt_of(ask), "ask:", "There.")
    kept = [bool(texts(turns, prompt_of(ask, TOLD))) for ask in asks]
    assert kept == sorted(kept) and 0 < sum(kept) < len(kept)


@pytest.mark.parametrize("letter", ["x", "я", "😀"])
@pytest.mark.parametrize("length", [1, 50, 1000])
def test_the_bound_is_one_of_memory(letter: str, length: int) -> None:
    turns = KeptTurns()
    turns.memory.limit(200_000)
    tracemalloc.start()
    try:
        for number in range(800):
            keep(turns, prompt_of({**ASK, "content": str(number)}), letter * length, "There.")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 120_000 < used < 220_000
