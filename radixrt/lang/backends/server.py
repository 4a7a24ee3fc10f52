"""How does a radixrt server answer a program's calls? With all it has: constraints, scoring, cache hints."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixrt.lang.answer import Answer
from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.kept_prompts import KeptPrefix, KeptPrompts, is_long
from radixrt.lang.backends.openai_format import path_of, pieces_of, standard_body
from radixrt.lang.backends.protocol import CacheHints, Call, ChoiceCall, Piece, Prompt, Scored
from radixrt.lang.backends.token_scoring import score_choices
from radixrt.lang.constraints import Choices, Constraint, Grammar, Regex
from radixrt.lang.errors import BackendError, BadRequest

DEFAULT_URL = "http://127.0.0.1:30000"
CONVERSATION_GONE = "conversation_gone"
"""The code of the error that says that a conversation is not kept any more."""


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
        self._kept = KeptPrompts()
        self._endpoints: asyncio.Future[frozenset[str]] | None = None

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        body = await self._body(call)
        kept = self._kept.longest(call.prompt) if is_long(call.prompt) else None
        if kept is not None:
            try:
                going_on = body | going_on_fields(call.prompt, kept)
                async with aclosing(self._pieces(call, going_on)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except BadRequest as error:
                if error.code != CONVERSATION_GONE:
                    raise
                self._kept.gone(kept.conversation)
        async with aclosing(self._pieces(call, body)) as pieces:
            async for piece in pieces:
                yield piece

    async def _body(self, call: Call) -> dict[str, Any]:
        """The request that says all of it."""
        body = standard_body(call, None)
        body |= call.sampling.given() | _constraint_fields(call.constraint)
        body |= _continuation_fields(call.continues)
        body["return_times"] = True
        if await self._offers("/v1/cache/release"):
            body["cache"] = cache_fields(call.hints)
        if is_long(call.prompt):
            body["keep"] = True
        return body

    async def _pieces(self, call: Call, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        first_answer = Answer()
        async with aclosing(self._http.answer(path_of(call), body)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    if piece.index == 0:
                        first_answer.add(piece)
                    yield piece
                if event.get("kept"):
                    self._kept.kept(event["id"], with_answer(call, first_answer))

    async def score(self, call: ChoiceCall) -> Scored:
        return Scored(
            await score_choices(
                call.prompt,
                call.continues,
                call.choices,
                call.unconditional,
                self._encode,
                self._logprobs,
            )
        )

    async def cache_tokens(self) -> int | None:
        with contextlib.suppress(BackendError, KeyError, TypeError):
            if await self._offers("/v1/cache/stats"):
                tokens = (await self._http.get("/v1/cache/stats"))["tokens"]
                return int(tokens["total"]) - int(tokens["pinned"])
        return None

    async def programs_ended(self, sessions: Sequence[str]) -> None:
        with contextlib.suppress(BackendError):
            if await self._offers("/v1/cache/release"):
                await self._http.post("/v1/cache/release", {"sessions": list(sessions)})

    async def pin(self, prefix: Prompt, seconds: float) -> str | None:
        with contextlib.suppress(BackendError, KeyError):
            if await self._offers("/v1/cache/pin"):
                body = {"ttl_s": seconds} | _prompt_field(prefix)
                lease = await self._http.post("/v1/cache/pin", body, is_patient=False)
                return str(lease["lease"])
        return None

    async def unpin(self, lease: str) -> None:
        with contextlib.suppress(BackendError):
            await self._http.post("/v1/cache/release", {"lease": lease})

    async def close(self) -> None:
        await self._http.close()

    async def _encode(self, prompt: Prompt, continues: bool) -> list[int]:
        body = _prompt_field(prompt)
        answer = await self._http.post("/tokenize", body | _continuation_fields(continues))
        ids: list[int] = answer["tokens"]
        return ids

    async def _logprobs(
        self, sequences: list[list[int]], starts: list[int]
    ) -> list[tuple[float, ...]]:
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
    return fields


def going_on_fields(prompt: Prompt, kept: KeptPrefix) -> dict[str, Any]:
    """What a request says instead of a prompt whose beginning the server keeps."""
    name = "prompt" if isinstance(prompt, str) else "messages"
    return {
        name: prompt[kept.length :],
        "continue_from": kept.conversation,
        "continue_after": kept.length,
    }


def with_answer(call: Call, answer: Answer) -> Prompt:
    """The prompt as it is when a program goes on from its answer."""
    if isinstance(call.prompt, str):
        return call.prompt + answer.text
    *before, last = call.prompt
    if call.continues:
        before.append({**last, "content": last["content"] + answer.text})
    else:
        before += [last, {"role": "assistant", "content": answer.text}]
    if answer.tool_calls:
        before[-1]["tool_calls"] = answer.tool_calls
    return before


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}


def _continuation_fields(continues: bool) -> dict[str, Any]:
    """Those of a conversation whose last message is to be continued."""
    return {"continue_final_message": True, "add_generation_prompt": False} if continues else {}


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
