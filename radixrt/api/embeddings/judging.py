"""Judges pairs of texts: by a cross-encoder, by a decoder's logits for yes and no, or by the cosine of two vectors."""

import math
from typing import NamedTuple

import numpy as np
from fastapi import Request

from radixrt.api.embeddings.embeddings import unit
from radixrt.api.embeddings.pooled import (
    Pooled,
    PooledFields,
    most_input_tokens,
    run_pooled,
)
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.messages.pooling import POOL, Pool
from radixrt.messages.requests import PairPrompt, TextPrompt


class Judged(NamedTuple):
    """The scores of pairs; a higher one means that the document fits the query better."""

    scores: list[float]
    run: Pooled


async def judge(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    pairs: list[tuple[str, str]],
    kind: str,
    instruction: str = "",
    most_document_tokens: int | None = None,
) -> Judged:
    """The scores of pairs of a query and a document.

    Args:
        kind: prefix of the response's id.
        instruction: for decoders; "": their usual one.
        most_document_tokens: to which longer documents are cut.

    Raises:
        RequestError: the model judges no pairs, or a text is empty or too long.
    """
    info = state.info.pooling
    if info is not None and info.task == "embed":
        return await _by_cosine(request, state, fields, pairs, kind, most_document_tokens)
    if info is not None and info.size != 1:
        raise RequestError(
            f"This server's classifier has {info.size} classes and gives no score of a pair; use /classify."
        )
    pool = POOL if info is not None else Pool(state.info.score_tokens)
    if info is None and not pool.logits_of:
        raise RequestError(
            "This server's model can't judge pairs of texts: its vocabulary has no single tokens for yes and no."
        )
    most_tokens = most_input_tokens(fields.truncate_prompt_tokens, state)
    prompts = [
        PairPrompt(
            query,
            document,
            instruction=instruction,
            most_tokens=most_tokens,
            most_document_tokens=most_document_tokens,
        )
        for query, document in pairs
    ]
    run = await run_pooled(request, state, fields, [*prompts], kind, pool)
    if info is not None:
        return Judged([float(vector[0]) for vector in run.vectors], run)
    return Judged([_probability(*vector.tolist()) for vector in run.vectors], run)


def _probability(relevant: float, not_relevant: float = 0.0) -> float:
    """Of the first of two logits (Qwen3-Reranker). One logit alone is its own log-odds."""
    return 1 / (1 + math.exp(min(not_relevant - relevant, 700.0)))


async def _by_cosine(
    request: Request,
    state: ServerState,
    fields: PooledFields,
    pairs: list[tuple[str, str]],
    kind: str,
    most_document_tokens: int | None,
) -> Judged:
    """The cosine of the texts' vectors. A text of several pairs is computed once."""
    most_tokens = most_input_tokens(fields.truncate_prompt_tokens, state)
    cut = [most for most in (most_tokens, most_document_tokens) if most is not None]
    limits = {document: min(cut, default=None) for _, document in pairs}
    limits |= {query: most_tokens for query, _ in pairs}
    prompts = [TextPrompt(text, most_tokens=most) for text, most in limits.items()]
    run = await run_pooled(request, state, fields, [*prompts], kind)
    vectors = {text: unit(one) for text, one in zip(limits, run.vectors, strict=True)}
    scores = [float(np.dot(vectors[query], vectors[document])) for query, document in pairs]
    return Judged(scores, run)
