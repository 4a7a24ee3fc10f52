"""Evaluates the demo model on entities, numbers and field names outside its training set.

Decoding is greedy, through any OpenAI-compatible server (`--base-url`), or with transformers
(`--local DIR`). `--serve demo --also-with="--kv-cache-dtype int8"` asks a server with these flags
the same, and compares the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import shlex
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import world
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Message = dict[str, Any]

LARGEST_LOSS = 0.01
"""Of the share of right answers, with the flags of `--also-with`."""


@dataclass(frozen=True)
class Reply:
    """The answer of the model and the number of prompt tokens."""

    message: Message
    prompt_tokens: int


# (messages, tools, JSON schema of the answer or None) -> reply
Complete = Callable[
    [list[Message], list[dict[str, Any]] | None, dict[str, Any] | None], Awaitable[Reply]
]


@dataclass(frozen=True)
class Suite:
    name: str
    says: str
    bar: float  # minimum share of correct answers
    make: Callable[[random.Random, world.Words], world.Sample]


SUITES = (
    Suite("qa_300", "document QA, ~300 tokens", 0.90, lambda r, w: world.qa(r, w, 6, 3, turns=1)),
    Suite(
        "qa_1500", "document QA, ~1500 tokens", 0.75, lambda r, w: world.qa(r, w, 20, 4, turns=1)
    ),
    Suite(
        "json",
        "JSON, all fields right",
        0.85,
        lambda r, w: world.extract_json(r, w, 1, 4, turns=1),
    ),
    Suite("label", "choice of a given label", 0.90, lambda r, w: world.label(r, w, 4, turns=1)),
    Suite(
        "second_turn",
        "second-turn reference",
        0.85,
        lambda r, w: world.second_turn(r, w, 4, 3, turns=2),
    ),
    Suite("tool", "tool name and arguments", 0.85, lambda r, w: world.tool(r, w, 3, turns=1)),
)


@dataclass
class Result:
    name: str
    says: str
    bar: float
    right: int = 0
    asked: int = 0
    prompt_tokens: int = 0
    wrong: list[int] = field(default_factory=list)  # conversations

    @property
    def share(self) -> float:
        return self.right / max(1, self.asked)

    def gain(self, other: Result) -> tuple[float, float]:
        """The share of right answers less that of ``other`` to the same conversations, and the
        standard error of this difference."""
        mine, theirs = set(self.wrong), set(other.wrong)
        gains = [(index in theirs) - (index in mine) for index in range(self.asked)]
        return statistics.mean(gains), statistics.stdev(gains) / math.sqrt(self.asked)


def tool_call(message: Message) -> tuple[str, Any] | None:
    """Name and arguments of the message's one tool call, parsed by the server or from the text."""
    calls = message.get("tool_calls") or []
    if calls:
        function = calls[0]["function"]
        arguments = function["arguments"]
        return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    found = re.fullmatch(
        r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", message.get("content") or "", re.S
    )
    if not found:
        return None
    call = json.loads(found[1])
    return call["name"], call["arguments"]


def is_right(task: str, expected: Message, got: Message) -> bool:
    try:
        if tool_call(expected) or tool_call(got):
            return tool_call(expected) == tool_call(got)
        content = (got.get("content") or "").strip()
        if task == "json":
            return json.loads(content) == json.loads(expected["content"])
        return content == expected["content"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


def schema_of(answer: str) -> dict[str, Any]:
    """The JSON schema of an object with these fields."""
    types = {
        k: {"type": "integer" if isinstance(v, int) else "string"}
        for k, v in json.loads(answer).items()
    }
    return {
        "type": "object",
        "properties": types,
        "required": list(types),
        "additionalProperties": False,
    }


async def play(suite: Suite, index: int, complete: Complete, constrain: bool) -> tuple[bool, Reply]:
    """Run one conversation with the model's own earlier answers. The last answer is evaluated."""
    rng = random.Random(f"{suite.name}:{index}")
    sample = suite.make(rng, world.Words(rng, "eval"))
    chat: list[Message] = []
    last = max(i for i, m in enumerate(sample.messages) if m["role"] == "assistant")
    if (
        suite.name == "tool"
    ):  # a turn after a call needs the tool's result, which is not evaluated here
        last = next(i for i, m in enumerate(sample.messages) if m["role"] == "assistant")
    for message in sample.messages[:last]:
        if message["role"] == "assistant":
            message = (await complete(chat, sample.tools, None)).message
        chat.append(message)
    expected = sample.messages[last]
    schema = schema_of(expected["content"]) if constrain and suite.name == "json" else None
    reply = await complete(chat, sample.tools, schema)
    return is_right(suite.name, expected, reply.message), reply


class ServerRefused(Exception):
    """The server returned an error, so the evaluation stops."""


def over_http(base_url: str, model: str | None, api_key: str) -> Complete:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    name = model or httpx.get(f"{base_url}/models", headers=headers).json()["data"][0]["id"]
    client = httpx.AsyncClient(timeout=300, headers=headers)

    async def complete(messages, tools, schema):
        body: dict[str, Any] = {
            "model": name,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 128,
        }
        if tools:
            body["tools"] = tools
        if schema:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "facts", "schema": schema, "strict": True},
            }
        response = await client.post(f"{base_url}/chat/completions", json=body)
        if response.is_error:
            raise ServerRefused(f"{response.url} answered {response.status_code}: {response.text}")
        answer = response.json()
        return Reply(answer["choices"][0]["message"], answer["usage"]["prompt_tokens"])

    return complete


def with_transformers(path: str) -> Complete:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    async def complete(messages, tools, schema):
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False
            )
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return Reply({"role": "assistant", "content": answer}, ids.shape[1])

    return complete


async def evaluate(
    complete: Complete,
    suites: list[Suite],
    asked: int,
    constrain: bool,
    concurrency: int,
    verbose: bool,
) -> list[Result]:
    results = {s.name: Result(s.name, s.says, s.bar) for s in suites}
    gate = asyncio.Semaphore(concurrency)
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        bar = progress.add_task("asking", total=asked * len(suites))

        async def one(suite: Suite, index: int) -> None:
            async with gate:
                right, reply = await play(suite, index, complete, constrain)
            result = results[suite.name]
            result.asked += 1
            result.right += right
            if not right:
                result.wrong.append(index)
            result.prompt_tokens += reply.prompt_tokens
            if verbose and not right:
                progress.console.print(suite.name, index, reply.message, markup=False)
            progress.advance(bar)

        async with asyncio.TaskGroup() as group:
            for suite in suites:
                for index in range(asked):
                    group.create_task(one(suite, index))
    return list(results.values())


def table_of(results: list[Result]) -> Table:
    table = Table(title="Demo model on unseen names, values and fields (greedy)")
    for heading in ("task", "asked", "prompt tokens", "right", "bar", ""):
        table.add_column(heading, justify="left" if heading in ("task", "") else "right")
    for r in results:
        met = "[green]met[/]" if r.share >= r.bar else "[red]missed[/]"
        mean_tokens = f"{r.prompt_tokens / max(1, r.asked):.0f}"
        table.add_row(r.says, str(r.asked), mean_tokens, f"{r.share:.1%}", f"{r.bar:.0%}", met)
    return table


def gains_of(results: list[Result], others: list[Result]) -> Table:
    """The difference that the flags of ``others`` make to the same conversations."""
    table = Table(title="Right answers with the further flags, less those without, in points")
    for heading in ("task", "asked", "difference", "standard error", "right only without", "right only with"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for before, after in zip(results, others, strict=True):
        gain, error = after.gain(before)
        lost, won = set(after.wrong) - set(before.wrong), set(before.wrong) - set(after.wrong)
        numbers = (f"{100 * gain:+.2f}", f"{100 * error:.2f}", str(len(lost)), str(len(won)))
        table.add_row(after.says, str(after.asked), *numbers)
    return table


@contextlib.contextmanager
def completer(args: argparse.Namespace, *flags: str) -> Iterator[Complete]:
    """The backend: transformers, a server started here, or a running server."""
    if args.local:
        yield with_transformers(args.local)
    elif args.serve:
        from bench.local_server import local_server

        with local_server(args.serve, "--log-level", "warning", *flags) as url:
            yield over_http(f"{url}/v1", args.model, args.api_key)
    else:
        yield over_http(args.base_url, args.model, args.api_key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", help="model name to send; the server's first if not given")
    parser.add_argument("--api-key", default="none")
    parser.add_argument(
        "--local", metavar="DIR", help="run this model directory with transformers instead"
    )
    parser.add_argument(
        "--serve",
        metavar="DIR",
        help="start a radixrt server on this model, or on demo, for the time",
    )
    parser.add_argument(
        "--also-with",
        metavar="FLAGS",
        help="with --serve: compare with the answers of a server that has these further flags",
    )
    parser.add_argument("--fast", action="store_true", help="20 conversations a task, not 200")
    parser.add_argument("--asked", type=int, help="conversations a task")
    parser.add_argument("--tasks", nargs="+", choices=[s.name for s in SUITES])
    parser.add_argument(
        "--free-json", action="store_true", help="send no JSON schema with the JSON task"
    )
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument("--verbose", action="store_true", help="print every wrong answer")
    args = parser.parse_args()
    suites = [s for s in SUITES if not args.tasks or s.name in args.tasks]
    asked = args.asked or (20 if args.fast else 200)
    constrain = not (args.free_json or args.local)
    if args.also_with and not args.serve:
        parser.error("--also-with needs --serve")

    def results_with(*flags: str) -> list[Result]:
        with completer(args, *flags) as complete:
            results = asyncio.run(
                evaluate(complete, suites, asked, constrain, args.concurrency, args.verbose)
            )
        Console().print(table_of(results))
        return results

    results = results_with()
    lost = False
    if args.also_with:
        others = results_with(*shlex.split(args.also_with))
        Console().print(gains_of(results, others))
        lost = any(
            after.gain(before)[0] < -LARGEST_LOSS
            for before, after in zip(results, others, strict=True)
        )
    if args.json:
        rows = [asdict(r) | {"share": r.share, "met": r.share >= r.bar} for r in results]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if args.fast:
        print(
            "Of 20 conversations a task, a share is right to within some nine points: too few to judge by."
        )
        return
    sys.exit(lost or any(r.share < r.bar for r in results))


if __name__ == "__main__":
    main()
