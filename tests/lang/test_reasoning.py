"""Reasoning is reported beside answers, and sent back to the model where its template wants it."""

import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import radixrt.lang as rl
from radixrt.lang.backends.openai import without_old_reasoning
from radixrt.lang.backends.protocol import Call, Piece, ToolCallPiece
from tests.lang import test_hints
from tests.lang.scripted_backend import ScriptedBackend
from tests.lang.test_hints import Recorder


def owner_of(place: str) -> str:
    """Get the owner of a place."""
    return "Zekoru"


class Reasoner(ScriptedBackend):
    """Reasons, calls the tool once, and answers."""

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        self.calls.append(call)
        yield Piece(reasoning=f"thought {len(self.calls)}, ")
        yield Piece(reasoning="and more")
        if len(self.calls) == 1:
            asked = ToolCallPiece(index=0, id="1", name="owner_of", arguments='{"place": "Vidur"}')
            yield Piece(tool_calls=(asked,), finish_reason="tool_calls")
        else:
            yield Piece(text="Zekoru.", finish_reason="stop")


@rl.function
def agent(s: rl.State) -> None:
    s += rl.user("Who owns Vidur?") + rl.assistant(rl.gen("asked", tools=[owner_of]))
    for call in s["asked"].calls:
        s += rl.tool(call, call.run())
    s += rl.assistant(rl.gen("answer", tools=[owner_of]))
    s += rl.user("Thanks.") + rl.assistant(rl.gen("last"))


def test_reasoning_is_resent_with_its_message_and_is_no_part_of_the_text() -> None:
    backend = Reasoner()
    state = agent.run(backend=backend)
    assert state["answer"].text == "Zekoru." and state.reasoning("answer") == "thought 2, and more"
    assert "thought" not in state.text()
    loop, after = backend.calls[1].prompt, backend.calls[2].prompt
    assert not isinstance(loop, str) and not isinstance(after, str)
    assert loop[1]["reasoning_content"] == "thought 1, and more"
    thoughts = [message.get("reasoning_content") for message in after]
    assert thoughts == [None, "thought 1, and more", None, "thought 2, and more", None]


def test_of_openai_s_api_only_tool_loops_get_their_reasoning_back() -> None:
    def said(reasoning: str, **fields: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "reasoning_content": reasoning, **fields}

    user, tool = {"role": "user", "content": "?"}, {"role": "tool", "content": "!"}
    calls: dict[str, Any] = {"tool_calls": [{}]}
    messages = [user, said("a", **calls), tool, said("b"), user, said("c", **calls), tool]
    sent = without_old_reasoning(messages)
    assert [message.get("reasoning_content") for message in sent] == [
        None, None, None, None, None, "c", None,
    ]  # fmt: skip
    assert messages[1]["reasoning_content"] == "a"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_by_either_name(monkeypatch: pytest.MonkeyPatch, field: str) -> None:

    message = {"role": "assistant", "content": "b", field: "because"}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    monkeypatch.setattr(test_hints, "ANSWER", json.dumps(answer).encode())
    with Recorder() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        @rl.function
        def program(s: rl.State) -> None:
            s += rl.user("a") + rl.assistant(rl.gen("x"))

        state = program.run(backend=rl.OpenAI(server.url, model="m"))
        server.shutdown()
    assert state["x"] == "b" and state.reasoning("x") == "because"
