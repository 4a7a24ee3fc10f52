"""``/score`` and ``/classify``: scores of pairs of texts, and classes of texts, in vLLM's form."""

import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from radixrt.api.embeddings.pooled import (
    PooledFields,
    compute,
    input_prompts,
    judge_pairs,
    prompt_errors_name,
    refuse_others,
    usage_of,
)
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.options import check_answer_count
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.client.pooling import Pooled, Vector, max_input_tokens, paired


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
