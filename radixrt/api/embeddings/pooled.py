"""Runs prompts that give numbers in place of answers, and reads the fields that these endpoints share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from radixrt.api.http.events import while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.http.middleware import request_id
from radixrt.api.requests.options import request_options
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import QueueFields, refuse_unsupported
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.messages.ids import num_ids, pack_ids, unpack_ids
from radixrt.messages.pooling import POOL, Pool
from radixrt.messages.requests import GenerateRequest, Prompt, TextPrompt, TokenPrompt

Vector = NDArray[np.float32]  # [numbers of a prompt]


class PooledFields(QueueFields, kw_only=True):
    """Fields of every request for numbers."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """A longer input is cut at its end to so many tokens; -1: to the context length. None: it is refused."""
    user: str | None = None
    """Accepted, and not used."""
    rid: str | None = None
    request_id: str | None = None
    """The same."""


class Pooled(NamedTuple):
    """The numbers of the prompts of one HTTP request."""

    id: str
    """Of the response."""
    vectors: list[Vector]
    """One a prompt."""
    prompt_tokens: int
    cached_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def run_pooled(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    prompts: list[Prompt],
    kind: str,
    pool: Pool = POOL,
) -> Pooled:
    """Compute prompts, as long as the client is there.

    Args:
        kind: prefix of the response's id.
        pool: what every prompt gives.

    Raises:
        RequestError: a field is out of its range, or a prompt was refused or dropped.
        EngineDiedError: the engine ended.
    """
    state.check_answer_count(len(prompts), 1)
    name = request_id(kind, fields.rid, fields.request_id)
    request.state.request_id = name
    options = msgspec.structs.replace(
        request_options(fields, state.config, caller_of(request), PREFILL_ONLY), pool=pool
    )
    requests = [
        GenerateRequest(request_id=f"{name}-{i}", group_id=name, prompt=prompt, options=options)
        for i, prompt in enumerate(prompts)
    ]
    chunks = await while_connected(request, state.run(requests))
    if any(chunk.finish_reason == "abort" for chunk in chunks):
        raise RequestError("The request was dropped before all of it was computed.", status=408)
    reports = [chunk.report for chunk in chunks]
    return Pooled(
        name,
        [np.frombuffer(chunk.vector, dtype="<f4") for chunk in chunks],
        sum(report.prompt_tokens for report in reports),
        sum(report.cached_tokens for report in reports),
    )


def input_prompts(
    given: str | list[Any], field: str, state: ServerState, most_tokens: int | None
) -> list[Prompt]:
    """The prompts of a field in OpenAI's forms: a text, texts, token ids, or lists of them.

    Args:
        most_tokens: to which longer ones are cut.

    Raises:
        RequestError: it is none of these, or too many; names the field.
    """
    prompts = parse_prompts(
        given, state.info.vocab_size, True, lambda n: state.check_answer_count(n, 1), field
    )
    return prompts if most_tokens is None else [_cut(prompt, most_tokens) for prompt in prompts]


def _cut(prompt: Prompt, most_tokens: int) -> Prompt:
    if isinstance(prompt, TextPrompt):
        return msgspec.structs.replace(prompt, most_tokens=most_tokens)
    if isinstance(prompt, TokenPrompt) and num_ids(prompt.token_ids) > most_tokens:
        return TokenPrompt(pack_ids(unpack_ids(prompt.token_ids)[:most_tokens]))
    return prompt


def most_input_tokens(asked: int | None, state: ServerState) -> int | None:
    """The limit to which inputs are cut: ``truncate_prompt_tokens``.

    Raises:
        RequestError: it is 0 or less, other than -1, or more than the context length.
    """
    longest = min(state.info.context_length, state.info.kv_pool_tokens)
    if asked is None or asked == -1:
        return asked and longest
    if not 1 <= asked <= longest:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {longest}, not {asked}.",
            param="truncate_prompt_tokens",
        )
    return asked


def refuse_others(body: dict[str, Any]) -> None:
    """Raises:
    RequestError: the body has a field that this version does not support.
    """
    taken = ("truncate_prompt_tokens", "documents")
    refuse_unsupported({name: value for name, value in body.items() if name not in taken})


@contextmanager
def prompt_errors_name(field: str) -> Iterator[None]:
    """Let errors about the prompt name the field of the request that holds it."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = field
        raise
