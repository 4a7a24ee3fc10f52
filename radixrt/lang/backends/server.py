"""How does radixrt answer a program's calls? With all it has: constraints, scoring, cache hints."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixrt.lang.answer import Answer
from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.kept_prompts import is_long
from radixrt.lang.backends.openai_format import path_of, pieces_of, standard_body, usage_of
from radixrt.lang.backends.protocol import (
    CacheHints,
    Call,
    ChoiceCall,
    Piece,
    Prompt,
    Score,
    Scored,
)
from radixrt.lang.backends.sent_once import SentOnce, prompt_fields
from radixrt.lang.constraints import Choices, Constraint, Grammar, Regex
from radixrt.lang.errors import BackendError, BadRequest

DEFAULT_URL = "http://127.0.0.1:30000"
CONVERSATION_GONE = "conversation_gone"
"""The code of the error that says that a conversation is not kept any more."""


class RadixrtBackend:
    """Whatever answers at a radixrt server's endpoints."""

    def __init__(self, name: str, http: HttpClient) -> None:
        self.name = name
        self._http = http
        self._sent = SentOnce(http, self._offers)
        self._endpoints: asyncio.Future[frozenset[str]] | None = None

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        first_answer = Answer()
        body = await self._body(call)
        async with aclosing(self._asked(path_of(call), body, call.prompt)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    if piece.index == 0:
                        first_answer.add(piece)
                    yield piece
                if event.get("kept"):
                    self._sent.prompts.kept(event["id"], with_answer(call, first_answer))

    async def _body(self, call: Call) -> dict[str, Any]:
        """The request that says all of it."""
        body = standard_body(call, None)
        body |= call.sampling.given() | _constraint_fields(call.constraint)
        body |= _continuation_fields(call.continues)
        body["return_times"] = True
        body |= await self._cache_field(call.hints)
        if is_long(call.prompt):
            body["keep"] = True
        return body

    async def _cache_field(self, hints: CacheHints) -> dict[str, Any]:
        offered = await self._offers("/v1/cache/release")
        return {"cache": cache_fields(hints)} if offered else {}

    async def _asked(
        self, path: str, body: dict[str, Any], prompt: Prompt
    ) -> AsyncGenerator[Any, None]:
        """What the server answers, as one or as events. Of the prompt it is sent what it does not keep."""
        kept = await self._sent.kept(prompt)
        while True:
            whole = body | prompt_fields(prompt, kept)
            try:
                async with aclosing(self._http.answer(path, whole)) as events:
                    async for event in events:
                        yield event
                return
            except BadRequest as error:
                if kept is None or error.code != CONVERSATION_GONE:
                    raise
                self._sent.prompts.gone(kept.conversation)
                kept = None

    async def score(self, call: ChoiceCall) -> Scored:
        body: dict[str, Any] = {"choices": call.choices, "unconditional": call.unconditional}
        if call.continues:
            body["continue_final_message"] = True
        body |= await self._cache_field(call.hints)
        (answer,) = [one async for one in self._asked("/score_choices", body, call.prompt)]
        scores = [
            Score(tuple(score["logprobs"]), tuple(score["unconditional_logprobs"] or ()))
            for score in answer["scores"]
        ]
        return Scored(scores, usage_of(answer["usage"]))

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
                body = {"ttl_s": seconds} | prompt_fields(prefix, self._sent.known(prefix))
                lease = await self._http.post("/v1/cache/pin", body, is_patient=False)
                return str(lease["lease"])
        return None

    async def unpin(self, lease: str) -> None:
        with contextlib.suppress(BackendError):
            await self._http.post("/v1/cache/release", {"lease": lease})

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


class Server(RadixrtBackend):
    """A radixrt server.

    Args:
        url: its address, with or without ``/v1``.
        api_key: where it was started with ``--api-key``.
    """

    def __init__(self, url: str = DEFAULT_URL, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        http = HttpClient(
            self.url,
            api_key,
            "Start one with `radixrt serve` (the built-in model) or `radixrt serve --model-path DIR`, or give the "
            "address of one: rl.set_default_backend(rl.Server(url)), or RADIXRT_URL in the environment.",
        )
        super().__init__(f"The radixrt server at {self.url}", http)


def cache_fields(hints: CacheHints) -> dict[str, Any]:
    """The ``cache`` object of a request."""
    fields: dict[str, Any] = {"session": hints.session} if hints.session else {}
    if hints.next_use_s is not None:
        fields["next_use_s"] = hints.next_use_s
    return fields


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
    if answer.reasoning:
        before[-1]["reasoning_content"] = answer.reasoning
    return before


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
