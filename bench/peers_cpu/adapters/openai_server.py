"""A server for engines without one: the part of the OpenAI API that the comparison's client uses.

Adapters are scripts that run in a peer's environment, so they import nothing of radixrt. They add
as little as they can: text is encoded and decoded here by the Rust tokenizer, tokens arrive by a
callback, and each becomes one event of the stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer


@dataclass(frozen=True)
class Generation:
    """What is asked of an engine; always greedy."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    json_schema: str | None
    """As JSON text."""


@dataclass(frozen=True)
class Progress:
    """What an engine tells about a generation."""

    tokens: list[int]
    """New ones."""
    finish_reason: str | None = None
    error: str | None = None


class GenerationEngine(Protocol):
    def start(self, generation: Generation, tell: Callable[[Progress], object]) -> None:
        """Queue it; ``tell`` may be called from any thread.

        Raises:
            ValueError: it can't be done; says why.
        """


def serve(engine: GenerationEngine, checkpoint: str, port: int) -> None:
    """Answer on 127.0.0.1 until a signal comes."""
    server = _Server(engine, checkpoint)
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


class _Server:
    def __init__(self, engine: GenerationEngine, checkpoint: str) -> None:
        self._engine = engine
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "model", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self._encode(prompt)
        return await self._answer(body, prompt, lambda text: {"text": text})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        text = self._tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        return await self._answer(
            body, self._encode(text), lambda text: {"delta": {"content": text}}
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    async def _answer(
        self, body: dict[str, Any], prompt: list[int], choice: Callable[[str], dict[str, Any]]
    ) -> Response:
        response_format = body.get("response_format") or {}
        schema = response_format.get("json_schema", {}).get("schema")
        generation = Generation(
            prompt,
            body["max_tokens"],
            bool(body.get("ignore_eos")),
            schema and json.dumps(schema),
        )
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Progress]()
        try:
            self._engine.start(
                generation, lambda progress: loop.call_soon_threadsafe(queue.put_nowait, progress)
            )
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        events = self._events(generation, queue, choice)
        if body.get("stream"):
            return StreamingResponse(_as_sse(events), media_type="text/event-stream")
        return JSONResponse(await _whole(events))

    async def _events(
        self,
        generation: Generation,
        queue: asyncio.Queue[Progress],
        choice: Callable[[str], dict[str, Any]],
    ) -> AsyncIterator[dict[str, Any]]:
        """A chunk for each progress, then the usage."""
        decoder = DecodeStream(skip_special_tokens=True)
        count, finished = 0, False
        while not finished:
            progress = await queue.get()
            if progress.error:
                yield {"error": {"message": progress.error}}
                return
            finished = progress.finish_reason is not None
            count += len(progress.tokens)
            backend = self._tokenizer.backend_tokenizer
            text = "".join(decoder.step(backend, token) or "" for token in progress.tokens)
            rest = {"token_ids": progress.tokens, "finish_reason": progress.finish_reason}
            yield {"choices": [{"index": 0, **choice(text), **rest}]}
        prompt = len(generation.prompt)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        yield {"choices": [], "usage": usage}


async def _as_sse(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """The stream as one completion; of its text only the tokens are kept."""
    tokens: list[int] = []
    answer: dict[str, Any] = {}
    async for event in events:
        answer.update(event)
        for choice in event.get("choices", []):
            tokens += choice["token_ids"]
    return {**answer, "choices": [{"index": 0, "token_ids": tokens}]}
