"""The FastAPI application: all endpoints and middleware."""

from collections.abc import Callable

from fastapi import FastAPI

from radixrt import __version__
from radixrt.api.about import about_routes
from radixrt.api.anthropic.messages import ERRORS as ANTHROPIC_ERRORS
from radixrt.api.anthropic.messages import message_routes
from radixrt.api.conversations.continuation import conversation_routes
from radixrt.api.embeddings import embedding_routes, rerank_routes, score_routes
from radixrt.api.http.browsers import CheckBrowsers, accepted_names, cors
from radixrt.api.http.endpoints import include
from radixrt.api.http.errors import install_error_handlers
from radixrt.api.http.keys import Authenticate, Keys
from radixrt.api.http.middleware import AnswerHead, LimitBody, RefuseWhileDraining, SetRequestId
from radixrt.api.native.cache import cache_routes, match_routes
from radixrt.api.native.generate import native_routes
from radixrt.api.native.infill import infill_routes
from radixrt.api.native.live import live_routes
from radixrt.api.native.prompt_calls import scoring_routes, tokenizer_routes
from radixrt.api.native.replicas import replica_routes
from radixrt.api.ollama.routes import ERRORS as OLLAMA_ERRORS
from radixrt.api.ollama.routes import ollama_routes
from radixrt.api.openai.chat import chat_routes
from radixrt.api.openai.completions import completion_routes
from radixrt.api.openai_responses.responses import response_routes
from radixrt.api.state import ServerState
from radixrt.api.tracing import TraceRequests, Tracing
from radixrt.base.config import ServerConfig
from radixrt.base.settings.setting import listed

_ROUTES = (
    chat_routes, completion_routes, message_routes, ollama_routes, response_routes, conversation_routes, native_routes, infill_routes, scoring_routes, tokenizer_routes,
    embedding_routes, rerank_routes, score_routes, cache_routes, match_routes, live_routes, replica_routes, about_routes,
)  # fmt: skip


MAX_BODY_BYTES = 32 << 20

ERROR_SHAPES = (ANTHROPIC_ERRORS, OLLAMA_ERRORS)
"""The forms of errors other than OpenAI's, by path."""


def build_app(
    state: ServerState, tracing: Tracing | None = None, *, is_one_of_several: bool = False
) -> FastAPI:
    """The application of a model.

    Args:
        is_one_of_several: the application in front of it (:mod:`radixrt.api.models.front`) checks
            and limits its requests.
    """
    # The interactive pages load scripts from elsewhere, so only the description itself is served.
    app = FastAPI(title="radixrt", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app, ERROR_SHAPES)
    if not is_one_of_several:
        check_requests(app, state.config, state.keys, lambda: state.is_draining)
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)
    include(app, [routes(state) for routes in _ROUTES])
    return app


def check_requests(
    app: FastAPI, config: ServerConfig, keys: Keys, is_draining: Callable[[], bool]
) -> None:
    """Add all that requests pass before they reach an endpoint."""
    app.add_middleware(AnswerHead)
    app.add_middleware(LimitBody, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(Authenticate, keys=keys)
    app.add_middleware(RefuseWhileDraining, is_draining=is_draining)
    origins = listed(config.cors_origins)
    names = accepted_names(config.host, listed(config.allowed_hosts))
    app.add_middleware(CheckBrowsers, names=names, origins=origins)
    if origins:  # outside of all that refuses, so that pages can read why
        app.add_middleware(cors, origins=origins)
    app.add_middleware(SetRequestId)
