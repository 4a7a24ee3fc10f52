"""Which endpoints are there? The app, put together."""

from fastapi import FastAPI

from radixrt import __version__
from radixrt.api.about import about_routes
from radixrt.api.cache import PinRequest, ReleaseRequest, WarmRequest, cache_routes
from radixrt.api.chat import chat_routes
from radixrt.api.completions import completion_routes
from radixrt.api.errors import install_error_handlers
from radixrt.api.grammar import CompileRequest, grammar_routes
from radixrt.api.keeping import KeepRequest, keeping_routes
from radixrt.api.metrics import metrics_routes
from radixrt.api.middleware import LimitBody, NameAnswers, RequireApiKey
from radixrt.api.native import NativeRequest, native_routes
from radixrt.api.openapi import describe_bodies
from radixrt.api.protocol import ChatCompletionRequest, CompletionRequest
from radixrt.api.scoring import ScoreRequest, scoring_routes
from radixrt.api.state import ServerState
from radixrt.api.text import Detokenize, TokenizeText, text_routes


def build_app(state: ServerState) -> FastAPI:
    # The interactive pages load scripts from elsewhere, so only the description itself is served.
    app = FastAPI(title="radixrt", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(LimitBody, max_bytes=state.config.max_body_bytes)
    if state.config.api_key is not None:
        app.add_middleware(RequireApiKey, api_key=state.config.api_key)
    app.add_middleware(NameAnswers)
    for routes in (
        chat_routes, completion_routes, keeping_routes, native_routes, scoring_routes, grammar_routes, cache_routes,
        text_routes, about_routes,
    ):  # fmt: skip
        app.include_router(routes(state))
    app.include_router(metrics_routes(state.metrics, state.client))
    describe_bodies(
        app,
        {
            "/v1/chat/completions": ChatCompletionRequest,
            "/v1/completions": CompletionRequest,
            "/v1/conversations": KeepRequest,
            "/generate": NativeRequest,
            "/score_choices": ScoreRequest,
            "/v1/grammar/compile": CompileRequest,
            "/v1/cache/warm": WarmRequest,
            "/v1/cache/pin": PinRequest,
            "/v1/cache/release": ReleaseRequest,
            "/tokenize": TokenizeText,
            "/detokenize": Detokenize,
        },
    )
    return app
