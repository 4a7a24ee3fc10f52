"""Requests of every kind, of a model and its adapters, and their answers as a client puts them together."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.torture.checkpoint import END_OF_THINKING

LENGTH = 400
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 80, "maxLength": 200},
        "b": {"type": "integer"},
    },
    "required": ["a", "b"],
}
CHECKED = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "minLength": 60, "maxLength": 150}},
            "required": ["word"],
        },
    },
}
_PROMPT = "The cat sat on the mat and "


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def asks(seed: int) -> list[Ask]:
    """One request of each kind; the seed makes their prompts and draws their own."""
    stop = ["zqj", "ers", "the"]
    return [
        _completion("greedy", seed, temperature=0),
        _completion("sampled", seed),
        _completion("penalties", seed, temperature=1.5, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
        _completion("n=2", seed, n=2),
        _completion("log-probabilities", seed, logprobs=2),
        _completion("JSON", seed, guided_json=SCHEMA, ignore_eos=False),
        _completion("checked values", seed, guided_json=CHECKED, ignore_eos=False),
        _completion("regular expression", seed, guided_regex="([a-z]{1,6} ){40}", ignore_eos=False),
        _completion("stop strings", seed, stop=stop, min_tokens=150),
        _completion("does not stream", seed, stream=False),
        _completion("does not stream, log-probabilities", seed, stream=False, logprobs=1, n=2),
        _completion("does not stream, JSON", seed, stream=False, guided_json=SCHEMA, ignore_eos=False),
        _chat("reasoning", seed, logit_bias={str(END_OF_THINKING): 1.5}),
        _chat("reasoning, then JSON", seed, logit_bias={str(END_OF_THINKING): 1.5}, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, ignore_eos=False),
        _chat("tools", seed, tools=[TOOL], tool_choice="required", chat_template_kwargs={"enable_thinking": False}, ignore_eos=False),
        _completion("adapter", seed, temperature=0, model="one"),
        _completion("other adapter", seed, logprobs=2, model="two"),
        _completion("activated adapter", seed, temperature=0, prompt=f"{_PROMPT * (1 + seed % 5)}{seed}<think></think>", model="activated"),
        _chat("tools do not stream", seed, tools=[TOOL], tool_choice="required", chat_template_kwargs={"enable_thinking": False}, ignore_eos=False, stream=False),
    ]  # fmt: skip


def _completion(kind: str, seed: int, **fields: Any) -> Ask:
    body = {"prompt": f"{_PROMPT * (1 + seed % 5)}{seed}", **_common(kind, seed), **fields}
    return Ask(kind, "/v1/completions", body)


def _chat(kind: str, seed: int, **fields: Any) -> Ask:
    messages = [{"role": "user", "content": f"{_PROMPT * (1 + seed % 5)}{seed}"}]
    body = {"messages": messages, **_common(kind, seed), **fields}
    return Ask(kind, "/v1/chat/completions", body)


def _common(kind: str, seed: int) -> dict[str, Any]:
    return {
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": 1000 * seed + len(kind),
        "ignore_eos": True,
        "stream": True,
    }


@dataclass
class Answer:
    """What a client has at the end."""

    texts: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    calls: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Name and arguments, by answer and call."""
    finish: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    """Of answers with log-probabilities."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    last_at: float = 0.0
    """Time of ``time.monotonic()`` of the last event."""
    longest_pause_s: float = 0.0
    """Between two events."""
    error: str = ""

    def read(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - (self.last_at or now))
        self.last_at = now
        if "error" in event:
            self.error = str(event["error"])
            return
        usage = event.get("usage") or {}
        assert "replayed_tokens" not in usage, "the answers that are compared are computed"
        for name, count in usage.items():
            if isinstance(count, int):
                self.usage[name] = count
        for choice in event["choices"]:
            self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        piece = choice.get("delta") or choice.get("message") or {}
        _add(self.texts, index, choice.get("text") or piece.get("content"))
        _add(self.reasoning, index, piece.get("reasoning_content"))
        for position, call in enumerate(piece.get("tool_calls") or []):
            function = call["function"]
            parts = self.calls.setdefault((index, call.get("index", position)), ["", ""])
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""
        if choice.get("logprobs"):
            self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            self.finish[index] = choice["finish_reason"]

    def difference(self, other: "Answer") -> str:
        """The first field in which the answers differ, with both values; empty: they are equal."""
        if self.error:
            return f"error: {self.error}"
        for name in ("texts", "reasoning", "calls", "finish", "tokens", "usage"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {_where_apart(ours, theirs)}"
        for index, theirs in other.logprobs.items():
            worst = max(abs(a - b) for a, b in zip(self.logprobs[index], theirs, strict=True))
            if worst > 1e-3:
                return f"log-probabilities differ by {worst}"
        return ""


def _add(texts: dict[int, str], index: int, piece: str | None) -> None:
    texts[index] = texts.get(index, "") + (piece or "")


def _where_apart(ours: dict[Any, Any], theirs: dict[Any, Any]) -> str:
    for key in theirs.keys() | ours.keys():
        a, b = ours.get(key), theirs.get(key)
        if a != b and isinstance(a, str | list) and isinstance(b, str | list):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
            return f"[{key}] of {len(a)} and {len(b)}, apart at {at}: {a[max(at - 20, 0) :][:60]!r} {b[max(at - 20, 0) :][:60]!r}"
    return f"{ours} {theirs}"[:300]


async def answer(
    client: httpx.AsyncClient, ask: Ask, watch: Callable[[Answer], None] = lambda answer: None
) -> Answer:
    """Ask, and read the answer to its end.

    Args:
        watch: gets the answer when its first event is about to come.
    """
    found = Answer()
    watch(found)
    if not ask.streams:
        response = await client.post(ask.path, json=ask.body)
        if response.status_code != 200:
            found.error = f"{response.status_code} {response.text}"
        else:
            found.read(response.json())
        return found
    body = {**ask.body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", ask.path, json=body) as response:
        if response.status_code != 200:
            found.error = f"{response.status_code} {(await response.aread()).decode()}"
            return found
        is_done = False
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.read(json.loads(line.removeprefix("data: ")))
            is_done = is_done or line == "data: [DONE]"
        if not is_done and not found.error:
            found.error = "the stream was cut"
    return found


def kinds(seeds: int) -> Iterator[Ask]:
    """Requests of all kinds, in turns."""
    for seed in range(seeds):
        yield from asks(seed)
