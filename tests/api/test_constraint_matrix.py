"""Constrained answers of a reasoning model: templates, APIs, drafts, budgets and tool choices, each
with each other.

The model is scripted: it wants to break the constraint at its first token, in its reasoning and
behind it. In every cell the answer satisfies the constraint and its reasoning is apart, or the
request is refused.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.conftest import RunningServer, starting
from tests.checkpoints import make_checkpoint
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.real_engine import RealEngine

ENDS = {"open": "<think>\n", "closed": "<think>\n\n</think>\n\n", "absent": ""}
"""What the chat template writes at the end of the prompt."""
VOCABULARIES = {
    "tags": ["<think>", "</think>"],
    "parts": ["</", ".</", "think", ">\n", ">\n\n"],
}
"""Tokens of each: a tag is one control token, or parts that merge with the text around it."""
APIS = ("chat", "completions", "responses", "messages", "ollama")
KINDS = ("schema", "auto", "auto or schema", "required", "named")
BUDGETS = (None, 0, 12)
SPECULATION = (False, True)
"""With it, each answer is drafted from the same answer before it, over the marks of the
reasoning."""
STREAMS = (False, True)
MAX_TOKENS = 128
EVERY_SCRIPT = "RADIXRT_EVERY_SCRIPT" in os.environ
SCRIPTS_OF_A_CELL = 1
ROUNDS = 3

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if 'open' in messages[-1].content %}<think>\n{% elif 'closed' in messages[-1].content %}<think>\n\n</think>\n\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2]}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
FLAG: dict[str, Any] = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}
TOOLS = {"find": SCHEMA, "drop": FLAG}
LETTERS = "<letters>"
"""What follows in a script is written in tokens of one letter."""
ENDLESS = "la" * MAX_TOKENS
SCRIPTS = (
    "",
    "Hmm</think>Hello there",
    ENDLESS,
    "<think>Hmm</think>Hello",
    "Hmm</think><think>Hmm</think>Hello",
    'Hmm{"city": 7}</think>{"city": "a</think>b", "n": 5}',
    f"Hmm{LETTERS}</think>Hello",
    'Hmm</think><tool_call>\n{"name": "drop", "arguments": {"city": 3}}\n</tool_call>Hello',
    'Hmm</think><tool_call>\n{"name": "find", "arguments": {"city": "Rome", "n": 9}}\n</tool_call>',
    'Hmm<tool_call>\n{"name": "drop", "arguments": {"flag": true}}\n</tool_call></think>Hello',
)
"""What the model wants to write."""
SCRIPTS_IN_PARTS = (
    *SCRIPTS,
    "Hmm.</think>\n\nHello there",
    '<think>\n\nHmm.</think>\n\n{"city": "Rome", "n": 9}',
    '{"city": "Rome", "n": 1}',
    f'{LETTERS}<tool_call>\n{{"name": "drop", "arguments": {{"flag": true}}}}\n</tool_call>',
    f"{LETTERS}<think>Hmm</think>\n\nHello",
)
"""Of the second vocabulary: tags that are merged with what is around them, answers without any, and
beginnings that may become either."""
WISHES = ["</think>", "<tool_call>", "{", '"', "}", "1", "\n", "<think>", "x"]
"""What it wants to write where it may not, the dearest first; before all of them, to end."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    vocabulary: str
    end: str
    api: str
    kind: str
    budget: int | None
    speculation: bool
    stream: bool
    script: int

    @property
    def is_refused(self) -> bool:
        """Completions have neither reasoning nor tools; the tags around a reasoning are tokens of
        its budget."""
        no_chat = self.api == "completions"
        return self.budget == 0 or (no_chat and (self.kind != "schema" or self.budget is not None))

    @property
    def prompt(self) -> str:
        return f"{self.end} script{self.script};"


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] | None = None
    is_cut_off: bool = False


@pytest.fixture(scope="module", params=VOCABULARIES)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("reasoning")
    make_checkpoint("llama", folder, vocab_size=512, num_hidden_layers=1, eos_token_id=1)
    are_tags = request.param == "tags"
    tokens = VOCABULARIES[request.param]
    save_byte_level(folder, TEMPLATE, tokens if are_tags else (), () if are_tags else tokens)
    with starting(folder) as start:
        running = start(None, folder, RealEngine, reasoning_parser="qwen3", max_total_tokens=16384)
        encode = running.vocabulary.encode

        def tokens_of(text: str) -> list[int]:
            marks, _, letters = text.partition(LETTERS)
            return [*encode(marks, False), *(i for one in letters for i in encode(one, False)), 1]

        scripts = [tokens_of(text) for text in SCRIPTS_IN_PARTS]

        def script(prompt: list[int]) -> list[int]:
            found = re.search(r"script(\d+);", running.vocabulary.decode(prompt))
            assert found is not None
            return scripts[int(found[1])]

        running.scheduler.script = script
        wishes = WISHES if are_tags else [">", *WISHES]
        running.scheduler.wishes = [1, *(i for wish in wishes for i in encode(wish, False))]
        yield running


# ---------------------------------------------------------------- requests


def request_of(cell: Cell) -> tuple[str, Json]:
    """The path and the body of a cell's request."""
    path, body, names = _BODIES[cell.api](cell)
    body |= {"model": "tiny", "temperature": 0, "speculation": cell.speculation}
    body["stream"] = cell.stream
    if cell.budget is not None:
        body["max_reasoning_tokens"] = cell.budget
    if cell.kind in ("schema", "auto or schema"):
        body |= names["schema"]
    if cell.kind != "schema":
        body |= {"tools": names["tools"]} | names[cell.kind.partition(" ")[0]]
    return path, body


def _functions() -> list[Json]:
    return [{"name": n, "parameters": schema, "strict": True} for n, schema in TOOLS.items()]


def _chat(cell: Cell) -> tuple[str, Json, Json]:
    return (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": cell.prompt}], "max_tokens": MAX_TOKENS},
        {
            "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "tools": [{"type": "function", "function": one} for one in _functions()],
            "auto": {"tool_choice": "auto"},
            "required": {"tool_choice": "required"},
            "named": {"tool_choice": {"type": "function", "function": {"name": "find"}}},
        },
    )  # fmt: skip


def _completions(cell: Cell) -> tuple[str, Json, Json]:
    """The prompt is what the template would write."""
    _, _, names = _chat(cell)
    head = f"<|im_start|>user\n{cell.prompt}<|im_end|>\n<|im_start|>assistant\n"
    return "/v1/completions", {"prompt": head + ENDS[cell.end], "max_tokens": MAX_TOKENS}, names


def _responses(cell: Cell) -> tuple[str, Json, Json]:
    return (
        "/v1/responses",
        {"input": cell.prompt, "max_output_tokens": MAX_TOKENS},
        {
            "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "tools": [{"type": "function", **one} for one in _functions()],
            "auto": {"tool_choice": "auto"},
            "required": {"tool_choice": "required"},
            "named": {"tool_choice": {"type": "function", "name": "find"}},
        },
    )


def _messages(cell: Cell) -> tuple[str, Json, Json]:
    tools = [{"name": n, "input_schema": schema, "strict": True} for n, schema in TOOLS.items()]
    return (
        "/v1/messages",
        {"messages": [{"role": "user", "content": cell.prompt}], "max_tokens": MAX_TOKENS},
        {
            "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "tools": tools,
            "auto": {"tool_choice": {"type": "auto"}},
            "required": {"tool_choice": {"type": "any"}},
            "named": {"tool_choice": {"type": "tool", "name": "find"}},
        },
    )


def _ollama(cell: Cell) -> tuple[str, Json, Json]:
    _, body, names = _chat(cell)
    return "/api/chat", body, names | {"schema": {"format": SCHEMA}}


_BODIES = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _messages,
    "ollama": _ollama,
}


def answer_of(cell: Cell, told: Json) -> Answer:
    """The answer, as a client of the API reads it."""
    answer = Answer(calls=[])
    assert answer.calls is not None
    match cell.api:
        case "chat":
            (choice,) = told["choices"]
            answer.is_cut_off = choice["finish_reason"] == "length"
            message = choice["message"]
            answer.reasoning = message["reasoning_content"] or ""
            answer.content = message["content"] or ""
            for call in message.get("tool_calls", ()):
                function = call["function"]
                answer.calls.append((function["name"], json.loads(function["arguments"])))
        case "completions":
            (choice,) = told["choices"]
            answer.content, answer.is_cut_off = choice["text"], choice["finish_reason"] == "length"
        case "responses":
            answer.is_cut_off = told["status"] == "incomplete"
            for item in told["output"]:
                if item["type"] == "reasoning":
                    answer.reasoning += "".join(part["text"] for part in item["content"])
                elif item["type"] == "message":
                    answer.content += "".join(part["text"] for part in item["content"])
                else:
                    answer.calls.append((item["name"], json.loads(item["arguments"])))
        case "messages":
            answer.is_cut_off = told["stop_reason"] == "max_tokens"
            for block in told["content"]:
                if block["type"] == "tool_use":
                    answer.calls.append((block["name"], block["input"]))
                elif block["type"] == "thinking":
                    answer.reasoning += block["thinking"]
                else:
                    answer.content += block["text"]
        case "ollama":
            answer.is_cut_off = told["done_reason"] == "length"
            message = told["message"]
            answer.reasoning, answer.content = message.get("thinking", ""), message["content"]
            for call in message.get("tool_calls", ()):
                answer.calls.append((call["function"]["name"], call["function"]["arguments"]))
    return answer


def streamed_answer_of(cell: Cell, text: str) -> Answer:
    """The answer, as a client of the API puts it together from the pieces of a stream alone."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert not any("error" in event and event["error"] for event in events), events[-1]
    answer, calls = Answer(calls=[]), list[list[str]]()
    for event in events:
        _STREAMED[cell.api](answer, calls, event)
    answer.calls = [(name, json.loads(arguments or "{}")) for name, arguments in calls]
    return answer


def _chat_event(answer: Answer, calls: list[list[str]], event: Json) -> None:
    for choice in event["choices"]:
        delta = choice["delta"]
        answer.reasoning += delta.get("reasoning_content") or ""
        answer.content += delta.get("content") or ""
        answer.is_cut_off |= choice["finish_reason"] == "length"
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments") or ""


def _completions_event(answer: Answer, _: list[list[str]], event: Json) -> None:
    for choice in event["choices"]:
        answer.content += choice["text"]
        answer.is_cut_off |= choice["finish_reason"] == "length"


def _responses_event(answer: Answer, calls: list[list[str]], event: Json) -> None:
    match event["type"]:
        case "response.reasoning_text.delta":
            answer.reasoning += event["delta"]
        case "response.output_text.delta":
            answer.content += event["delta"]
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            calls.append([event["item"]["name"], ""])
        case "response.function_call_arguments.delta":
            calls[-1][1] += event["delta"]
        case "response.incomplete":
            answer.is_cut_off = True


def _messages_event(answer: Answer, calls: list[list[str]], event: Json) -> None:
    match event["type"]:
        case "content_block_start" if event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        case "content_block_delta":
            delta = event["delta"]
            answer.reasoning += delta.get("thinking", "")
            answer.content += delta.get("text", "")
            if delta["type"] == "input_json_delta":
                calls[-1][1] += delta["partial_json"]
        case "message_delta":
            answer.is_cut_off = event["delta"]["stop_reason"] == "max_tokens"


def _ollama_event(answer: Answer, calls: list[list[str]], event: Json) -> None:
    message = event["message"]
    answer.reasoning += message.get("thinking") or ""
    answer.content += message.get("content") or ""
    answer.is_cut_off |= event.get("done_reason") == "length"
    for call in message.get("tool_calls") or ():
        calls.append([call["function"]["name"], json.dumps(call["function"]["arguments"])])


_STREAMED = {
    "chat": _chat_event,
    "completions": _completions_event,
    "responses": _responses_event,
    "messages": _messages_event,
    "ollama": _ollama_event,
}


# ---------------------------------------------------------------- checks


def check(cell: Cell, response: httpx.Response) -> Answer | None:
    """The answer; None if the request is refused."""
    if cell.is_refused:
        assert response.status_code == 400
        told = response.json()["error"]
        message = told if isinstance(told, str) else told["message"]
        assert (
            re.search("max_reasoning_tokens|budget_tokens|tools|tool_choice", message)
            and len(message) > 30
        )
        return
    assert response.status_code == 200, response.text
    if cell.stream:
        answer = streamed_answer_of(cell, response.text)
    else:
        answer = answer_of(cell, response.json())
    script = SCRIPTS_IN_PARTS[cell.script]
    opens = script.removeprefix(LETTERS).startswith("<think>")
    if cell.kind == "schema" and cell.vocabulary == "parts":
        opens = opens or script.startswith(f"{LETTERS}<")  # allowed only as a part of the tag
    reasons = cell.end == "open" or (cell.end == "absent" and opens)
    if cell.api == "completions":
        reasons = False
    closes = "</think>" in script or (cell.vocabulary == "tags" and script != ENDLESS)
    never_closes = reasons and not closes and cell.budget is None
    if never_closes:
        assert answer.is_cut_off and answer.reasoning and not (answer.content or answer.calls)
        return answer
    writes = bool(script) or cell.vocabulary == "parts"  # the dearest wish is no tag
    assert bool(answer.reasoning) == (reasons and writes)
    is_free = cell.vocabulary == "parts" and cell.kind == "auto"
    assert not (reasons and "Hmm" in answer.content) or (is_free and script.count("Hmm") > 1)
    check_answer(cell, answer)
    return answer


def check_answer(cell: Cell, answer: Answer) -> None:
    """The constraint holds for what is apart from the reasoning."""
    calls = answer.calls or []
    for name, arguments in calls:
        jsonschema.validate(arguments, TOOLS[name])
    if cell.kind in ("required", "named"):
        assert calls and not answer.content and not answer.is_cut_off
        assert cell.kind == "required" or {name for name, _ in calls} == {"find"}
    elif cell.kind == "schema" or (cell.kind == "auto or schema" and not calls):
        assert not calls and not answer.is_cut_off
        jsonschema.validate(json.loads(answer.content), SCHEMA)
    elif cell.kind == "auto or schema":
        assert len(calls) == 1 and not answer.content and not answer.is_cut_off
    else:
        opening = "<think>|" if cell.vocabulary == "tags" else ""  # else it is free text
        assert not re.search(f"{opening}</think>|<tool_call>", answer.content)


async def failures(server: RunningServer, cells: list[Cell]) -> list[str]:
    """The cells that break their constraints, and how."""
    found, places = list[str](), asyncio.Semaphore(16)
    answers: dict[Cell, Answer | None] = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def run(cell: Cell) -> None:
            path, body = request_of(cell)
            async with places:
                response = await client.post(path, json=body)
            try:
                answers[cell] = check(cell, response)
                plain = dataclasses.replace(cell, speculation=False, stream=False)
                assert answers[cell] == answers[plain], f"otherwise {answers[plain]}"
            except Exception as error:
                found.append(f"{cell}: {type(error).__name__} {error}\n{response.text}"[:900])

        for mode in itertools.product(SPECULATION, STREAMS):
            await asyncio.gather(*(run(c) for c in cells if (c.speculation, c.stream) == mode))
    return found


@pytest.mark.parametrize("api", APIS)
def test_every_cell_is_constrained_or_refused(
    server: RunningServer, api: str, request: pytest.FixtureRequest
) -> None:
    """Each cell with some of the scripts, in turn: whole without drafts, and streamed with them.
    All scripts in all four ways in ``make constraint-matrix``."""
    vocabulary: str = request.node.callspec.params["server"]
    num_scripts = len(SCRIPTS if vocabulary == "tags" else SCRIPTS_IN_PARTS)
    cells, numbers = [], itertools.count(APIS.index(api))
    every = itertools.product([vocabulary], ENDS, [api], KINDS, BUDGETS)
    if vocabulary == "parts" and not EVERY_SCRIPT:  # half of the cells: the next API has the others
        every = itertools.islice(every, APIS.index(api) % 2, None, 2)
    for axes in every:
        scripts = range(num_scripts)
        if not EVERY_SCRIPT:
            scripts = [next(numbers) % num_scripts for _ in range(SCRIPTS_OF_A_CELL)]
        refused = Cell(*axes, False, False, 0).is_refused
        for script in [*scripts][: 1 if refused else None]:
            cells += [
                Cell(*axes, with_drafts, stream, script)
                for with_drafts, stream in itertools.product(SPECULATION, STREAMS)
                if EVERY_SCRIPT or with_drafts == stream
            ]
    answered = sum(not cell.is_refused for cell in cells)
    for _ in range(ROUNDS):  # behind a mask that was late nothing is drafted for a while
        before = drafts_of(server)
        found = asyncio.run(failures(server, cells))
        assert not found, f"{len(found)} of {len(cells)}\n" + "\n".join(found[:8])
        if drafts_of(server) > before + answered:
            return
    pytest.fail("no drafts, so nothing is known of them")


def drafts_of(server: RunningServer) -> int:
    """Accepted draft tokens so far."""
    text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("radixrt_accepted_draft_tokens")]
    return sum(int(float(line.split()[-1])) for line in lines)
