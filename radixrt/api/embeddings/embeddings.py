"""``/v1/embeddings``: vectors of texts or token ids."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from radixrt.api.embeddings.pooled import (
    PooledFields,
    compute,
    input_prompts,
    prompt_errors_name,
    refuse_others,
    usage_of,
)
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError, shown
from radixrt.client.pooling import Pooled, Vector, check_embeds, max_input_tokens, shortened

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
