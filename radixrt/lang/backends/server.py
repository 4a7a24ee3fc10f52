"""Backend for radixrt servers, and the default backend of programs."""

import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixrt.base.server_url import DEFAULT_URL, URL_VARIABLE
from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.openai_format import path_of, pieces_of, standard_body, usage_of
from radixrt.lang.backends.protocol import (
    Backend,
    CachedPrompt,
    Call,
    ChoiceCall,
    Choices,
    Constraint,
    Grammar,
    Piece,
    Prompt,
    Regex,
    Score,
    Scored,
)
from radixrt.lang.errors import BackendError


class RadixrtBackend:
    """Calls the endpoints of a radixrt server."""

    def __init__(self, name: str, http: HttpClient, cache_salt: str | None = None) -> None:
        self.name = name
        self._http = http
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        """The field of each request."""

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        body = standard_body(call, call.adapter)
        body |= call.sampling.given() | _constraint_fields(call.constraint)
        body |= self._salt | _cache_field(call) | {"return_times": True}
        if call.stream_values:
            body["stream_values"] = True
        if call.continues:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        async with aclosing(self._http.answer(path_of(call), body)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    yield piece

    async def score(self, call: ChoiceCall) -> Scored:
        name = "prompt" if isinstance(call.prompt, str) else "messages"
        body = {name: call.prompt, "choices": call.choices, "unconditional": call.unconditional}
        if call.continues:
            body["continue_final_message"] = True
        if call.adapter is not None:
            body["model"] = call.adapter
        body |= self._salt | _cache_field(call)
        answer = await self._http.request("POST", "/score_choices", body)
        scores = [
            Score(tuple(score["logprobs"]), tuple(score["unconditional_logprobs"] or ()))
            for score in answer["scores"]
        ]
        return Scored(scores, usage_of(answer["usage"]))

    async def cache_tokens(self) -> int | None:
        """Tokens of the KV pool that are not pinned."""
        with contextlib.suppress(BackendError, KeyError, TypeError):
            tokens = (await self._http.request("GET", "/v1/cache/stats"))["tokens"]
            return int(tokens["total"]) - int(tokens["pinned"])
        return None

    async def compute_ahead(self, prompt: Prompt) -> None:
        name = "prompt" if isinstance(prompt, str) else "messages"
        with contextlib.suppress(BackendError):
            body = {name: prompt, "priority": "idle"} | self._salt
            await self._http.request("POST", "/v1/cache/warm", body)

    async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
        sent = [one if isinstance(one, str) else {"messages": one} for one in prompts if one]
        with contextlib.suppress(BackendError, KeyError, TypeError):
            answer = await self._http.request(
                "POST", "/v1/cache/match", {"prompts": sent} | self._salt
            )
            found = iter([CachedPrompt(**one) for one in answer["matches"]])
            return [next(found) if one else CachedPrompt() for one in prompts]
        return None


class Server(RadixrtBackend):
    """A radixrt server.

    Args:
        url: the address, with or without ``/v1``.
        api_key: the key, if the server was started with ``--api-key``.
        cache_salt: of all requests; they share their KV only with requests of this salt.

    >>> Server("http://127.0.0.1:30000/v1").url
    'http://127.0.0.1:30000'
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        http = HttpClient(
            self.url,
            api_key,
            "Start one with `radixrt serve` (the built-in model) or `radixrt serve --model-path DIR`, or give the "
            "address of one: rl.set_default_backend(rl.Server(url)), or RADIXRT_URL in the environment.",
        )
        super().__init__(f"The radixrt server at {self.url}", http, cache_salt)


_default: Backend | None = None


def set_default_backend(backend: Backend | str | None) -> None:
    """Set the backend of programs that name none.

    Args:
        backend: a backend, or the address of a radixrt server. None: the server at ``RADIXRT_URL``,
            or at the default address.
    """
    global _default
    _default = None if backend is None else backend_of(backend)


def default_backend() -> Backend:
    """The backend that was set; else the server at RADIXRT_URL, or at the default address."""
    global _default
    if _default is None:
        _default = Server(os.environ.get(URL_VARIABLE, DEFAULT_URL))
    return _default


def backend_of(given: Backend | str) -> Backend:
    """A backend, or the radixrt server at an address."""
    return Server(given) if isinstance(given, str) else given


def _cache_field(call: Call | ChoiceCall) -> dict[str, Any]:
    """The ``cache`` object of a request."""
    return {} if call.next_use_s is None else {"cache": {"next_use_s": call.next_use_s}}


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    """Fields of constraints that OpenAI's API does not have."""
    match constraint:
        case Regex():
            return {"regex": constraint.pattern}
        case Choices():
            return {"guided_choice": constraint.texts}
        case Grammar():
            return {"guided_grammar": constraint.text}
    return {}
