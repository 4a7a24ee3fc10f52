"""``/score`` and ``/classify``: scores of pairs of texts, and classes of texts, in vLLM's form."""

import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from radixrt.api.embeddings.judging import judge
from radixrt.api.embeddings.pooled import (
    Pooled,
    PooledFields,
    Vector,
    input_prompts,
    most_input_tokens,
    prompt_errors_name,
    refuse_others,
    run_pooled,
)
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError


class ScorePairsRequest(PooledFields, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    """One text on a side stands beside each on the other."""
    instruction: str | None = None
    """For decoders: the task by which a pair is judged."""


class ClassifyRequest(PooledFields, kw_only=True):
    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""


def score_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    async def score_pairs(request: Request, fields: ScorePairsRequest) -> Response:
        pairs = _pairs(fields)
        state.check_answer_count(len(pairs), 1)
        judged = await judge(request, state, fields, pairs, "score", fields.instruction or "")
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
            raise RequestError("This server's model is no classifier.")
        most_tokens = most_input_tokens(fields.truncate_prompt_tokens, state)
        with prompt_errors_name("input"):
            prompts = input_prompts(fields.input, "input", state, most_tokens)
            run = await run_pooled(request, state, fields, prompts, "classify")
        data = [
            {"index": index, **_classes(vector, info.labels)}
            for index, vector in enumerate(run.vectors)
        ]
        return json_response(_listed(data, run, state))

    return router


def _pairs(fields: ScorePairsRequest) -> list[tuple[str, str]]:
    """Raises:
    RequestError: a text is empty, or the lists have different lengths.
    """
    first, second = (
        [given] if isinstance(given, str) else given for given in (fields.text_1, fields.text_2)
    )
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts or "" in texts:
            raise RequestError(f"{name} is empty, or holds an empty text.", param=name)
    most = max(len(first), len(second))
    if {len(first), len(second)} - {1, most}:
        raise RequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one of either, or as many of both.",
            param="text_2",
        )
    first, second = (texts * (most // len(texts)) for texts in (first, second))
    return list(zip(first, second, strict=True))


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
        "usage": run.usage,
    }
