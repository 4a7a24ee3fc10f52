"""Which endpoints are there? The app, put together."""

from fastapi import FastAPI, Request, Response

from radixrt import __version__
from radixrt.api.chat import chat_routes
from radixrt.api.completions import completion_routes
from radixrt.api.errors import install_error_handlers
from radixrt.api.events import json_response
from radixrt.api.middleware import LimitBody, RequireApiKey
from radixrt.api.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    # The interactive pages load scripts from elsewhere, so only the description itself is served.
    app = FastAPI(title="radixrt", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(LimitBody, max_bytes=state.config.max_body_bytes)
    if state.config.api_key is not None:
        app.add_middleware(RequireApiKey, api_key=state.config.api_key)
    app.include_router(completion_routes(state))
    app.include_router(chat_routes(state))

    @app.get("/health")
    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    return app
