"""Servers of three tiny models, of which the memory holds two, and their clients."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import orjson
import psutil

from tests.checkpoints import make_tokenizer
from tests.servers import Server, serving
from tests.torture.leaks import module_of

NAMES = ("llama", "qwen3", "olmo2")
"""Architectures of the models, and their names."""
MEMORY_MB = 1200
"""Holds two: each is counted with half a gibibyte for its processes."""
ENGINE = ("worker", "scheduler", "tokenizer")


@contextlib.contextmanager
def three_models(checkpoint: Callable[[str], Path], *flags: str) -> Iterator[Server]:
    """A server of the three models until the block ends."""
    first, *others = (make_tokenizer(checkpoint(name)) for name in NAMES)
    further = [flag for folder in others for flag in ("--model", str(folder))]
    names = ("--served-model-name", *NAMES)
    sizes = ("--max-total-tokens", "12288", "--model-memory-mb", str(MEMORY_MB))
    with serving(first, *further, *names, *sizes, *flags) as server:
        yield server


def body_for(model: str, number: int, *, length: int = 40) -> dict:
    """A request whose answer is the same each time."""
    messages = [{"role": "user", "content": f"Count from {number} on."}]
    fixed = {"temperature": 0, "ignore_eos": True, "max_tokens": length, "timeout": 300}
    return {"model": model, "messages": messages, "stream": True, **fixed}


async def streamed(client: httpx.AsyncClient, body: dict) -> str:
    """The text of a streamed chat answer, which ends as it should."""
    text, finish = "", None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = orjson.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            assert event["model"] == body["model"]
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    assert finish == "length", (finish, text)
    return text


def engine_processes(server: Server) -> list[psutil.Process]:
    """The workers, schedulers and tokenizer processes of all models that are loaded."""
    found = []
    for process in server.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module_of(process) in ENGINE:
                found.append(process)
    return found


def label_of(process: psutil.Process) -> str:
    """Model and kind of an engine's process, such as ``llama/worker``; "": it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        command = process.cmdline()
        return command[command.index("--label") + 1]
    return ""


def memory_mb(server: Server) -> float:
    """The memory of these processes; each page that several share counts once."""
    total = 0
    for process in engine_processes(server):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total / (1 << 20)
