"""``python -m bench.peers_cpu agent``: turns of an agent, which sends its whole conversation again
with each turn.

    python -m bench.peers_cpu agent --checkpoint gemma --engines radixrt-q4_k_m llama.cpp-q4_k_m
    python -m bench.peers_cpu agent ... --running ollama http://127.0.0.1:11434 gemma3:270m

The script is the same for all: a system prompt with descriptions of tools, then in each turn what a
tool has returned. After each turn the agent also asks for a title, as coding agents do, so that
another prompt comes between. The answers are the engine's own.

*Recomputed* are the tokens of a turn's prompt that the turn before has sent and that did not come
from the cache. *Computed* are all that did not, from the second turn on.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.markdown import markdown, median_and_range
from bench.peers_cpu.checkpoints import Checkpoint
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import Engine
from bench.peers_cpu.serving import EngineFailedError, serving

ANSWER_TOKENS = 40
TOOLS = 24
LINES_OF_RESULT = 24
TIMEOUT_S = 1800
_NAMES = ["read", "list", "count", "sort", "merge", "split", "check", "write", "find", "pack"]


@dataclass(frozen=True)
class Turn:
    """The counts and times of one request."""

    prompt: int
    cached: int | None
    """None: the server does not report it."""
    first_token_s: float
    seconds: float


@dataclass(frozen=True)
class Session:
    """All turns of an agent."""

    turns: list[Turn]

    @property
    def recomputed(self) -> int | None:
        """
        >>> Session([Turn(100, 0, 1, 2), Turn(150, 96, 1, 2), Turn(190, 150, 1, 2)]).recomputed
        4
        """
        pairs = list(zip(self.turns, self.turns[1:], strict=False))
        if any(turn.cached is None for turn in self.turns):
            return None
        return sum(max(0, before.prompt - (turn.cached or 0)) for before, turn in pairs)

    @property
    def computed(self) -> float | None:
        """Share of the prompts' tokens, from the second turn on.

        >>> Session([Turn(100, 0, 1, 2), Turn(150, 96, 1, 2), Turn(190, 150, 1, 2)]).computed
        0.27647...
        """
        later = self.turns[1:]
        if any(turn.cached is None for turn in later):
            return None
        prompt = sum(turn.prompt for turn in later)
        return 1 - sum(turn.cached or 0 for turn in later) / prompt


def measure_sessions(
    parsed: argparse.Namespace, engines: list[Engine], checkpoint: Checkpoint
) -> None:
    """Print the table; ``parsed`` has rounds, turns, quick, peers_dir and running."""
    sessions: dict[str, list[Session]] = {}
    for number in range(1 if parsed.quick else parsed.rounds):
        for engine in engines:
            log = Path(tempfile.gettempdir()) / f"radixrt-peers-{engine.name}-agent.log"
            try:
                model = converted(engine, checkpoint, parsed.peers_dir)
                with serving(engine, checkpoint.folder, model, parsed.peers_dir, log) as url:
                    sessions.setdefault(engine.name, []).append(
                        run_session(url, "model", number, parsed.turns)
                    )
            except EngineFailedError as error:
                print(f"{engine.name} failed: {error}", flush=True)
        for name, url, model_name in parsed.running:
            address = url.rstrip("/").removesuffix("/v1") + "/v1"
            sessions.setdefault(name, []).append(
                run_session(address, model_name, number, parsed.turns)
            )
        print(f"round {number + 1} done", flush=True)
    print("\n".join(markdown([_row(name, each) for name, each in sessions.items()])))


def run_session(url: str, model: str, seed: int, turns: int) -> Session:
    """Converse with a server.

    Args:
        seed: another one gives other texts, which no earlier round has left in a cache.
    """
    texts = random.Random(seed)
    messages = [{"role": "system", "content": system_prompt(texts)}]
    taken = []
    # llama-server closes a connection after some requests, perhaps while the next is sent.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(timeout=TIMEOUT_S, limits=limits) as client:
        # What is computed at the first request of all, such as a graph, is not the agent's.
        ask(client, url, model, [{"role": "user", "content": "Hello."}], 4)
        for number in range(turns):
            result = tool_result(number, texts)
            messages.append({"role": "user", "content": result})
            turn, answer = ask(client, url, model, messages, ANSWER_TOKENS)
            messages.append({"role": "assistant", "content": answer})
            taken.append(turn)
            title = [{"role": "user", "content": f"Write a title of three words for: {result[:300]}"}]  # fmt: skip
            ask(client, url, model, title, 8)
    return Session(taken)


def system_prompt(texts: random.Random) -> str:
    """Instructions and descriptions of tools, of some 2,000 tokens."""
    tools = [
        {
            "name": f"{texts.choice(_NAMES)}_{number}",
            "description": f"Use it to {texts.choice(_NAMES)} up to {texts.randrange(10, 99)} files of the project, and never more than one folder at a time.",
            "parameters": {"path": {"type": "string"}, "lines": {"type": "integer", "maximum": texts.randrange(100, 999)}},
        }
        for number in range(TOOLS)
    ]  # fmt: skip
    return "You are an agent that works on a program. You have these tools:\n" + "\n".join(map(json.dumps, tools))  # fmt: skip


def tool_result(number: int, texts: random.Random) -> str:
    """A part of a program, as a tool returns it."""
    lines = [
        f"def {texts.choice(_NAMES)}_{line}(a, b):\n    return a * {texts.randrange(99)} + b"
        for line in range(LINES_OF_RESULT)
    ]
    return f"Result of call {number}, module_{number}.py:\n" + "\n".join(lines) + "\nWhat do you do next?"  # fmt: skip


def ask(
    client: httpx.Client, url: str, model: str, messages: Sequence[dict[str, Any]], max_tokens: int
) -> tuple[Turn, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first, text = 0.0, ""
    usage: dict[str, Any] = {}
    with client.stream("POST", f"{url}/chat/completions", json=body) as response:
        if response.is_error:
            raise EngineFailedError(f"status {response.status_code}: {response.read()[:300]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                delta = choice["delta"]
                if content := delta.get("content") or delta.get("reasoning_content"):
                    first = first or time.perf_counter() - begin
                    text += content
    seconds = time.perf_counter() - begin
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Turn(usage.get("prompt_tokens", 0), cached, first or seconds, seconds), text


def _row(name: str, sessions: list[Session]) -> dict[str, str]:
    last = sessions[-1]
    later = [[turn for turn in session.turns[1:]] for session in sessions]
    means = [sum(turn.seconds for turn in turns) / len(turns) for turns in later]
    first_tokens = [sum(turn.first_token_s for turn in turns) / len(turns) for turns in later]
    unknown = "not reported"
    return {
        "engine": name,
        "prompt tokens": f"{sum(turn.prompt for turn in last.turns):,}",
        "recomputed": unknown if last.recomputed is None else f"{last.recomputed:,}",
        "computed": unknown if last.computed is None else f"{last.computed:.1%}",
        "first turn, s": median_and_range([session.turns[0].seconds for session in sessions], 2),
        "later turns, s": median_and_range(means, 2),
        "to their first token, s": median_and_range(first_tokens, 2),
    }
