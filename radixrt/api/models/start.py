"""Makes the models of a server that has several, and waits until the first is loaded."""

import math
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from radixrt.api.app import build_app
from radixrt.api.conversations.store import ConversationStore
from radixrt.api.http.keys import Keys
from radixrt.api.models.model import LoadableModel
from radixrt.api.models.models import Models
from radixrt.api.state import KEPT_CONVERSATIONS_TTL_S, ServerState
from radixrt.api.tracing import Tracing
from radixrt.base.child import ServedModel
from radixrt.base.config import ServerConfig
from radixrt.base.liveness.link import AddModel, SupervisorLink
from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import EngineInfo


async def start_models(
    served: Sequence[ServedModel],
    keys: Keys,
    supervisor: SupervisorLink,
    connect: Callable[[int, ServerConfig], EngineClient],
    trace: Callable[[ServerConfig], Tracing | None],
) -> Models:
    """
    Args:
        connect: makes the client of a model, by its number.
        trace: makes the exporter of a model's traces.

    Returns:
        the models, of which the first is loaded.

    Raises:
        RequestError: the first model cannot be loaded.
    """
    first = served[0].config
    conversations = ConversationStore(first.kept_conversations_mb << 20, KEPT_CONVERSATIONS_TTL_S)

    def make_app(model: LoadableModel, info: EngineInfo) -> tuple[ServerState, ASGIApp]:
        state = ServerState(model.config, model.client, info, keys, conversations)
        return state, build_app(state, trace(model.config), is_one_of_several=True)

    def make(number: int, one: ServedModel) -> LoadableModel:
        link = supervisor.of_model(number)
        if number >= len(served):
            supervisor.tell(AddModel(one.config))
        return LoadableModel(one, connect(number, one.config), link, make_app)

    models = Models(
        served,
        make,
        memory_bytes=math.inf if first.model_memory_mb is None else first.model_memory_mb << 20,
        max_loaded=first.max_loaded_models or math.inf,
        max_wait_s=first.max_queue_seconds or math.inf,
    )
    await models.all[0].load(is_first=True)
    models.start()
    return models
