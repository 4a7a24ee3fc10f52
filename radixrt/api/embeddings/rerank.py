"""``/v1/rerank``: sorts documents by how well they fit a query, in the form of Jina's and Cohere's
APIs."""

from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.embeddings.pooled import PooledFields, judge_pairs, refuse_others, usage_of
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.requests.messages import string_in
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError

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
