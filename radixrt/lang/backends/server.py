"""How does a radixrt server answer a program's calls? With all it has: constraints, scoring, cache hints."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.openai_format import path_of, pieces_of, standard_body
from radixrt.lang.backends.protocol import CacheHints, Call, Piece, Prompt, Score
from radixrt.lang.constraints import Choices, Constraint, Grammar, Regex
from radixrt.lang.errors import BackendError

DEFAULT_URL = "http://127.0.0.1:30000"


class Server:
    """A radixrt server.

    Args:
        url: its address, with or without ``/v1``.
        api_key: where it was started with ``--api-key``.
    """

    def __init__(self, url: str = DEFAULT_URL, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"The radixrt server at {self.url}"
        self._http = HttpClient(
            self.url,
            api_key,
            "Start one with `radixrt serve` (the built-in model) or `radixrt serve --model-path DIR`, or give the "
            "address of one: rl.set_default_backend(rl.Server(url)), or RADIXRT_URL in the environment.",
        )
        self._endpoints: asyncio.Future[frozenset[str]] | None = None

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        body = standard_body(call, None)
        body |= {name: value for name, value in call.sampling.given().items() if name not in body}
        body |= call.sampling.given() | _constraint_fields(call.constraint)
        if call.continues:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if await self._offers("/v1/cache/release"):
            body["cache"] = cache_fields(call.hints)
        async with aclosing(self._http.events(path_of(call), body)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    yield piece

    async def score(
        self, prompt: Prompt, continues: bool, choices: Sequence[str], unconditional: bool
    ) -> list[Score]:
        """Encode the prompt with each choice behind it, as it will be encoded when it is part of a prompt, and score
        what differs from the prompt alone."""
        alone, *whole = await asyncio.gather(
            self._encode(prompt, continues, ""),
            *(self._encode(prompt, continues, choice) for choice in choices),
        )
        start = min(shared_tokens(alone, ids) for ids in whole)
        start = max(start, 1)  # nothing comes before the first token that could make it likely
        sequences = list(whole)
        starts = [start] * len(whole)
        if unconditional:
            sequences += [ids[:1] + ids[start:] for ids in whole]
            starts += [1] * len(whole)
        logprobs = await self._logprobs(sequences, starts)
        without = logprobs[len(whole) :] if unconditional else [()] * len(whole)
        return [Score(*pair) for pair in zip(logprobs, without, strict=False)]

    async def program_ended(self, session: str) -> None:
        with contextlib.suppress(BackendError):
            if await self._offers("/v1/cache/release"):
                await self._http.post("/v1/cache/release", {"session": session})

    async def close(self) -> None:
        await self._http.close()

    async def _encode(self, prompt: Prompt, continues: bool, choice: str) -> list[int]:
        """The token ids of a prompt and what follows it."""
        if isinstance(prompt, str):
            body: dict[str, Any] = {"prompt": prompt + choice}
        else:
            body = _with_continuation(list(prompt), continues, choice)
        answer = await self._http.post("/tokenize", body)
        ids: list[int] = answer["tokens"]
        return ids

    async def _logprobs(
        self, sequences: list[list[int]], starts: list[int]
    ) -> list[tuple[float, ...]]:
        """The log-probabilities of each sequence's tokens from its start on, in one batch."""
        body = {
            "input_ids": sequences,
            "return_logprob": True,
            "logprob_start_len": starts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }
        results = await self._http.post("/generate", body)
        return [
            tuple(entry[0] for entry in result["meta_info"]["input_token_logprobs"])
            for result in results
        ]

    async def _offers(self, endpoint: str) -> bool:
        """Whether the server has an endpoint; it is asked once."""
        if self._endpoints is None:
            self._endpoints = asyncio.ensure_future(self._ask_for_endpoints())
        return endpoint in await asyncio.shield(self._endpoints)

    async def _ask_for_endpoints(self) -> frozenset[str]:
        try:
            return frozenset((await self._http.get("/"))["endpoints"])
        except (BackendError, KeyError, TypeError):
            self._endpoints = None  # asked again at the next call
            return frozenset()


def cache_fields(hints: CacheHints) -> dict[str, Any]:
    """The ``cache`` object of a request."""
    fields: dict[str, Any] = {"session": hints.session}
    if hints.next_use_s is not None:
        fields["next_use_s"] = hints.next_use_s
    if hints.keep_for_s is not None:
        fields |= {"retain": "high", "ttl_s": hints.keep_for_s}
    return fields


def shared_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _with_continuation(messages: list[Any], continues: bool, choice: str) -> dict[str, Any]:
    """A conversation whose last message, the assistant's, goes on with the choice."""
    if not continues and not choice:
        return {"messages": messages}
    if continues:
        last = {**messages[-1], "content": messages[-1]["content"] + choice}
        messages = [*messages[:-1], last]
    else:
        messages = [*messages, {"role": "assistant", "content": choice}]
    return {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    """Those of constraints that OpenAI's API does not know."""
    match constraint:
        case Regex():
            return {"regex": constraint.pattern}
        case Choices():
            return {"guided_choice": constraint.texts}
        case Grammar():
            return {"guided_grammar": constraint.text}
    return {}
