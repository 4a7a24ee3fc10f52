"""Computes the prompts of a request for numbers, and reads the fields that these endpoints
share."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import Request

from radixrt.api.http.events import while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import QueueFields, refuse_unsupported
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.client.pooling import Judged, Pooled, cut, judge, max_input_tokens, run_pooled
from radixrt.messages.requests import DEFAULT_POOLING, PoolingRequest, Prompt


class PooledFields(QueueFields, kw_only=True):
    """Fields of every request for numbers."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """A longer input is cut at its end to so many tokens; -1: to the context length. None: it is
    refused."""
    user: str | None = None
    """Accepted, and not used."""
    rid: str | None = None
    request_id: str | None = None
    """The same."""


async def compute(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    kind: str,
    prompts: list[Prompt],
    pool: PoolingRequest = DEFAULT_POOLING,
) -> Pooled:
    """Compute prompts, as long as the client is there.

    Args:
        kind: prefix of the response's id.
        pool: what every prompt gives.

    Raises:
        RequestError: a field is out of its range, or a prompt was refused or dropped.
        EngineDiedError: the engine ended.
    """
    check_answer_count(state.config, len(prompts))
    name = request.state.request_id = request_id(kind, fields.rid, fields.request_id)
    options = request_options(fields, state.config, caller_of(request), PREFILL_ONLY)
    return await while_connected(request, run_pooled(state.run, name, prompts, options, pool))


async def judge_pairs(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    kind: str,
    pairs: list[tuple[str, str]],
    instruction: str = "",
    max_document_tokens: int | None = None,
) -> Judged:
    """:func:`radixrt.client.pooling.judge` for a request; ``kind`` as in :func:`compute`."""
    return await judge(
        partial(compute, request, state, fields, kind),
        state.info,
        pairs,
        instruction=instruction,
        max_tokens=max_input_tokens(fields.truncate_prompt_tokens, state.info),
        max_document_tokens=max_document_tokens,
    )


def usage_of(run: Pooled) -> dict[str, Any]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": run.prompt_tokens,
        "total_tokens": run.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }


def input_prompts(
    given: str | list[Any], field: str, state: ServerState, max_tokens: int | None
) -> list[Prompt]:
    """The prompts of a field in OpenAI's forms: a text, texts, token ids, or lists of them.

    Args:
        max_tokens: to which longer ones are cut.

    Raises:
        RequestError: it is none of these, or too many; names the field.
    """
    return [cut(prompt, max_tokens) for prompt in parse_prompts(given, state, field=field)]


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
