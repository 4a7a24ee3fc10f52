"""Endpoints that give numbers in place of text: embeddings, reranking in the form of Jina's and
Cohere's APIs, and scores of pairs and classes in vLLM's form."""

import asyncio
import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.messages import string_in
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import parse_prompts
from radixrt.api.requests.protocol import QueueFields, refuse_unsupported
from radixrt.api.state import Context, errors_name
from radixrt.base.errors import RequestError, shown, wrong
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
from radixrt.messages.requests import DEFAULT_POOLING, PoolingRequest, Prompt

COHERE = "/v2/rerank"
"""Returns documents only where the request asks for them."""

WRITTEN_AT_ONCE = 16
"""Vectors: 16 of 4096 numbers take some milliseconds."""

routes = Endpoints()


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


class EmbeddingRequest(PooledFields, kw_only=True):
    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: str | None = None
    """"float", or "base64": the numbers as 32-bit floats, little-endian."""
    dimensions: int | None = None
    """Length to which the vectors are cut, for models that were trained for it (Matryoshka)."""


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


class ScorePairsRequest(PooledFields, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    """One text on a side stands beside each on the other."""
    instruction: str | None = None
    """The task by which, with a decoder, a pair is judged."""


class ClassifyRequest(PooledFields, kw_only=True):
    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""


def _refuse(body: dict[str, Any]) -> None:
    """Refuse the fields that this version does not support."""
    taken = ("truncate_prompt_tokens", "documents")
    refuse_unsupported({name: value for name, value in body.items() if name not in taken})


@routes.takes("/v1/embeddings", EmbeddingRequest, _refuse)
async def embeddings(fields: EmbeddingRequest, context: Context) -> Response:
    if fields.encoding_format not in (None, "float", "base64"):
        says = f'must be "float" or "base64", not {shown(fields.encoding_format)}'
        raise wrong("encoding_format", says)
    max_tokens = max_input_tokens(fields.truncate_prompt_tokens, context.state.info)
    found = await embed(fields, context, fields.input, max_tokens, fields.dimensions)
    form = in_base64 if fields.encoding_format == "base64" else as_list
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(await written(found.vectors, form))
    ]
    return _response(found, context, object="list", data=data)


async def rerank(fields: RerankRequest, context: Context) -> Response:
    texts = [
        one if isinstance(one, str) else string_in(one, "text", f"documents[{i}]")
        for i, one in enumerate(fields.documents)
    ]
    _check_rerank(fields, texts)
    pairs = [(fields.query, text) for text in texts]
    instruction = fields.instruction or fields.instruct
    judged = await _judge(fields, context, "rerank", pairs, instruction, fields.max_tokens_per_doc)
    shows = fields.return_documents
    if shows is None:
        shows = context.request.url.path != COHERE
    best = sorted(range(len(texts)), key=lambda i: -judged.scores[i])[: fields.top_n]
    results = [
        {"index": i, "relevance_score": judged.scores[i]}
        | ({"document": {"text": texts[i]}} if shows else {})
        for i in best
    ]
    return _response(judged.run, context, results=results)


async def score_pairs(fields: ScorePairsRequest, context: Context) -> Response:
    pairs = paired(fields.text_1, fields.text_2)
    check_answer_count(context.state.config, len(pairs))
    judged = await _judge(fields, context, "score", pairs, fields.instruction)
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(judged.scores)
    ]
    return _response(judged.run, context, object="list", created=int(time.time()), data=data)


for _path in ("/v1/rerank", "/rerank", COHERE):
    routes.takes(_path, RerankRequest, _refuse)(rerank)
for _path in ("/score", "/v1/score"):
    routes.takes(_path, ScorePairsRequest, _refuse)(score_pairs)


@routes.takes("/classify", ClassifyRequest, _refuse)
async def classify(fields: ClassifyRequest, context: Context) -> Response:
    info = context.state.info.pooling
    if info is None or info.task != "classify":
        raise RequestError("This server's model is not a classifier.")
    max_tokens = max_input_tokens(fields.truncate_prompt_tokens, context.state.info)
    run = await _computed(fields, context, "classify", fields.input, max_tokens)
    data = [
        {
            "index": index,
            "label": info.labels[int(np.argmax(vector))],
            "probs": vector.tolist(),
            "num_classes": len(info.labels),
        }
        for index, vector in enumerate(run.vectors)
    ]
    return _response(run, context, object="list", created=int(time.time()), data=data)


async def embed(
    fields: PooledFields,
    context: Context,
    given: str | list[Any],
    max_tokens: int | None,
    dimensions: int | None = None,
) -> Pooled:
    """The vectors of an ``input`` field.

    Args:
        max_tokens: to which longer inputs are cut; None: they are refused.
        dimensions: to which the vectors are cut.

    Raises:
        RequestError: the model gives no vectors, or none of this length, or the input is malformed
            or too long.
        EngineDiedError: the engine ended.
    """
    info = context.state.info.pooling
    check_embeds(info, dimensions)
    found = await _computed(fields, context, "embd", given, max_tokens)
    if dimensions is None or info is None:
        return found
    vectors = [shortened(one, dimensions, info.normalized) for one in found.vectors]
    return found._replace(vectors=vectors)


async def _computed(
    fields: PooledFields,
    context: Context,
    kind: str,
    given: str | list[Any],
    max_tokens: int | None,
) -> Pooled:
    """The numbers of an ``input`` field in OpenAI's forms: a text, texts, token ids, or lists of
    them; arguments as of :func:`embed` and :func:`_compute`."""
    with errors_name("input", "prompt"):
        prompts = parse_prompts(given, context.state, field="input")
        prompts = [cut(prompt, max_tokens) for prompt in prompts]
        return await _compute(fields, context, kind, prompts)


async def _compute(
    fields: PooledFields,
    context: Context,
    kind: str,
    prompts: list[Prompt],
    pool: PoolingRequest = DEFAULT_POOLING,
) -> Pooled:
    """Compute prompts, as long as the client is there.

    Args:
        kind: prefix of the response's id.
        pool: what every prompt gives.
    """
    check_answer_count(context.state.config, len(prompts))
    name = context.name(request_id(kind, fields.rid, fields.request_id))
    options = request_options(fields, context, PREFILL_ONLY)
    return await context.wait(run_pooled(context.state.run, name, prompts, options, pool))


async def _judge(
    fields: PooledFields,
    context: Context,
    kind: str,
    pairs: list[tuple[str, str]],
    instruction: str | None,
    max_document_tokens: int | None = None,
) -> Judged:
    """:func:`radixrt.client.pooling.judge` for a request; ``kind`` as in :func:`_compute`."""
    info = context.state.info
    return await judge(
        partial(_compute, fields, context, kind),
        info,
        pairs,
        instruction=instruction or "",
        max_tokens=max_input_tokens(fields.truncate_prompt_tokens, info),
        max_document_tokens=max_document_tokens,
    )


def _check_rerank(fields: RerankRequest, texts: list[str]) -> None:
    """Refuse empty texts, and numbers below 1."""
    if not fields.query:
        raise wrong("query", "is empty; give at least one character")
    if not texts:
        raise wrong("documents", "is empty; give at least one text")
    if "" in texts:
        raise wrong(f"documents[{texts.index('')}]", "is empty; leave it out")
    for name in ("top_n", "max_tokens_per_doc"):
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise wrong(name, f"must be at least 1, not {value}")


def _response(run: Pooled, context: Context, **fields: Any) -> Response:
    usage = {
        "prompt_tokens": run.prompt_tokens,
        "total_tokens": run.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }
    model = context.state.config.model_name
    return json_response({"id": run.id, "model": model, **fields, "usage": usage})


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
