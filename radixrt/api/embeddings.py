"""Endpoints that give numbers in place of text: embeddings, reranking, scores of pairs, classes."""

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.requests.messages import string_in
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import QueueFields, refuse_unsupported
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError, shown
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.client.pooling import (
    Judged,
    Pooled,
    Vector,
    check_embeds,
    cut,
    judge,
    max_input_tokens,
    paired,
    run_pooled,
    shortened,
)
from radixrt.messages.pooling import DEFAULT_POOLING, PoolingRequest
from radixrt.messages.requests import Prompt


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


WRITTEN_AT_ONCE = 16
"""Vectors: 16 of 4096 numbers take some milliseconds."""


class EmbeddingRequest(PooledFields, kw_only=True):
    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: str | None = None
    """"float", or "base64": the numbers as 32-bit floats, little-endian."""
    dimensions: int | None = None
    """Length to which the vectors are cut, for models that were trained for it (Matryoshka)."""


def embedding_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/embeddings", EmbeddingRequest, refuse_others)
    async def embeddings(request: Request, fields: EmbeddingRequest) -> Response:
        if fields.encoding_format not in (None, "float", "base64"):
            raise RequestError(
                f'encoding_format must be "float" or "base64", not {shown(fields.encoding_format)}.',
                param="encoding_format",
            )
        found = await embed(
            request,
            state,
            fields,
            fields.input,
            max_input_tokens(fields.truncate_prompt_tokens, state.info),
            fields.dimensions,
        )
        form = in_base64 if fields.encoding_format == "base64" else as_list
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(await written(found.vectors, form))
        ]
        return json_response(
            {
                "id": found.id,
                "object": "list",
                "model": state.config.model_name,
                "data": data,
                "usage": usage_of(found),
            }
        )

    return router


async def embed(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    given: str | list[Any],
    max_tokens: int | None,
    dimensions: int | None = None,
) -> Pooled:
    """The vectors of an ``input`` field.

    Args:
        max_tokens: to which longer inputs are cut; None: they are refused.
        dimensions: to which the vectors are cut.

    Raises:
        RequestError: the model gives no vectors, or none of this length; or as :func:`compute`.
    """
    info = state.info.pooling
    check_embeds(info, dimensions)
    with prompt_errors_name("input"):
        prompts = input_prompts(given, "input", state, max_tokens)
        found = await compute(request, state, fields, "embd", prompts)
    if dimensions is None or info is None:
        return found
    return found._replace(
        vectors=[shortened(one, dimensions, info.normalized) for one in found.vectors]
    )


async def written(vectors: list[Vector], form: Callable[[Vector], Any]) -> list[Any]:
    """Vectors in a form of JSON, some at a time; other requests go on in between."""
    found = []
    for index, vector in enumerate(vectors):
        if index % WRITTEN_AT_ONCE == 0:
            await asyncio.sleep(0)
        found.append(form(vector))
    return found


def in_base64(vector: Vector) -> str:
    """32-bit floats, little-endian."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def as_list(vector: Vector) -> orjson.Fragment:
    """A JSON array."""
    return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))


COHERE = "/v2/rerank"
"""Returns documents only where the request asks for them."""


class RerankRequest(PooledFields, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    """Texts, or objects with a ``text``."""
    top_n: int | None = None
    """Number of results; None: all."""
    return_documents: bool | None = None
    instruction: str | None = None
    """The task by which, with a decoder, a document is judged."""
    instruct: str | None = None
    """The same."""
    max_tokens_per_doc: int | None = None
    """Longer documents are cut at their ends."""


def rerank_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    async def rerank(request: Request, fields: RerankRequest) -> Response:
        texts = [_text(given, f"documents[{i}]") for i, given in enumerate(fields.documents)]
        _check(fields, texts)
        judged = await judge_pairs(
            request,
            state,
            fields,
            "rerank",
            [(fields.query, text) for text in texts],
            fields.instruction or fields.instruct or "",
            fields.max_tokens_per_doc,
        )
        shows = fields.return_documents
        if shows is None:
            shows = request.url.path != COHERE
        best = sorted(range(len(texts)), key=lambda i: -judged.scores[i])[: fields.top_n]
        results = [
            {"index": i, "relevance_score": judged.scores[i]}
            | ({"document": {"text": texts[i]}} if shows else {})
            for i in best
        ]
        return json_response(
            {
                "id": judged.run.id,
                "model": state.config.model_name,
                "results": results,
                "usage": usage_of(judged.run),
            }
        )

    for path in ("/v1/rerank", "/rerank", COHERE):
        router.takes(path, RerankRequest, refuse_others)(rerank)
    return router


def _text(document: str | dict[str, Any], where: str) -> str:
    return document if isinstance(document, str) else string_in(document, "text", where)


def _check(fields: RerankRequest, texts: list[str]) -> None:
    """Raises:
    RequestError: a text is empty, or a number is below 1; names the field.
    """
    if not fields.query:
        raise RequestError("query is empty; give at least one character.", param="query")
    if not texts:
        raise RequestError("documents is empty; give at least one text.", param="documents")
    if "" in texts:
        where = f"documents[{texts.index('')}]"
        raise RequestError(f"{where} is empty; leave it out.", param=where)
    for name in ("top_n", "max_tokens_per_doc"):
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, not {value}.", param=name)


class ScorePairsRequest(PooledFields, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    """One text on a side stands beside each on the other."""
    instruction: str | None = None
    """The task by which, with a decoder, a pair is judged."""


class ClassifyRequest(PooledFields, kw_only=True):
    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""


def score_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    async def score_pairs(request: Request, fields: ScorePairsRequest) -> Response:
        pairs = paired(fields.text_1, fields.text_2)
        check_answer_count(state.config, len(pairs))
        judged = await judge_pairs(request, state, fields, "score", pairs, fields.instruction or "")
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(judged.scores)
        ]
        return json_response(_listed(data, judged.run, state))

    for path in ("/score", "/v1/score"):
        router.takes(path, ScorePairsRequest, refuse_others)(score_pairs)

    @router.takes("/classify", ClassifyRequest, refuse_others)
    async def classify(request: Request, fields: ClassifyRequest) -> Response:
        info = state.info.pooling
        if info is None or info.task != "classify":
            raise RequestError("This server's model is not a classifier.")
        max_tokens = max_input_tokens(fields.truncate_prompt_tokens, state.info)
        with prompt_errors_name("input"):
            prompts = input_prompts(fields.input, "input", state, max_tokens)
            run = await compute(request, state, fields, "classify", prompts)
        data = [
            {"index": index, **_classes(vector, info.labels)}
            for index, vector in enumerate(run.vectors)
        ]
        return json_response(_listed(data, run, state))

    return router


def _classes(vector: Vector, labels: tuple[str, ...]) -> dict[str, Any]:
    best = labels[int(np.argmax(vector))]
    return {"label": best, "probs": vector.tolist(), "num_classes": len(labels)}


def _listed(data: list[dict[str, Any]], run: Pooled, state: ServerState) -> dict[str, Any]:
    return {
        "id": run.id,
        "object": "list",
        "created": int(time.time()),
        "model": state.config.model_name,
        "data": data,
        "usage": usage_of(run),
    }
