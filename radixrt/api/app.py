"""The FastAPI application: all endpoints and middleware."""

from collections.abc import Callable

from fastapi import FastAPI

from radixrt import __version__
from radixrt.api import about, embeddings
from radixrt.api.anthropic import messages
from radixrt.api.http.browsers import BrowserRules, accepted_names, cors
from radixrt.api.http.endpoints import include
from radixrt.api.http.errors import install_error_handlers
from radixrt.api.http.keys import Keys
from radixrt.api.http.middleware import Admit, SetRequestId
from radixrt.api.native import adapters, cache, generate, infill, live, pieces, prompt_calls
from radixrt.api.ollama import routes as ollama
from radixrt.api.openai import chat, completions
from radixrt.api.openai_responses import responses
from radixrt.api.state import ServerState
from radixrt.api.tracing import TraceRequests, Tracing
from radixrt.base.config import ServerConfig
from radixrt.base.settings.setting import listed

_MODULES = (
    chat, completions, messages, ollama, responses, generate, infill, pieces, prompt_calls, embeddings, cache, adapters, live, about,
)  # fmt: skip

MAX_BODY_BYTES = 32 << 20


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
    app.state.server = state
    install_error_handlers(app)
    if not is_one_of_several:
        check_requests(app, state.config, state.keys, lambda: state.is_draining)
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)
    include(app, [module.routes for module in _MODULES])
    return app


def check_requests(
    app: FastAPI, config: ServerConfig, keys: Keys, is_draining: Callable[[], bool]
) -> None:
    """Add all that requests pass before they reach an endpoint."""
    origins = listed(config.cors_origins)
    browsers = BrowserRules(accepted_names(config.host, listed(config.allowed_hosts)), origins)
    app.add_middleware(
        Admit,
        browsers=browsers,
        keys=keys,
        is_draining=is_draining,
        max_body_bytes=MAX_BODY_BYTES,
    )
    if origins:  # outside of all that refuses, so that pages can read why
        app.add_middleware(cors, origins=origins)
    app.add_middleware(SetRequestId)
