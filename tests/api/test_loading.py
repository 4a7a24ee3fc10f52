"""The api process answers before its engine does."""

import asyncio
import shutil
import socket
from pathlib import Path

import httpx

from radixrt.api.server import serve
from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Outbox
from radixrt.base.liveness.link import SupervisorLink
from tests.servers.fake_scheduler import engine_info

BODIES = {
    "/v1/chat/completions": lambda body: body["error"]["message"],
    "/v1/messages": lambda body: body["error"]["message"] if body["type"] == "error" else "",
    "/api/chat": lambda body: body["error"],
}


def test_while_the_model_is_loaded_every_request_gets_503_with_the_reason(
    model_folder: Path,
) -> None:
    asyncio.run(_load(model_folder))


async def _load(model_folder: Path) -> None:
    channels = Channels(Channels.make_run_dir())
    config = ServerConfig(model_path=str(model_folder), served_model_name="tiny")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.ensure_future(serve(config, channels, listener, SupervisorLink()))
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            for path in ("/ready", "/health", "/v1/models", "/"):
                response = await client.get(path)
                assert response.status_code == 503 and response.headers["retry-after"]
                assert "loading its model" in response.json()["error"]["message"]
            for path, message_in in BODIES.items():
                response = await client.post(path, json={"messages": []})
                assert response.status_code == 503
                assert "loading its model" in message_in(response.json())
            engine = Outbox(channels.address("tokenizer", "api"))
            engine.send(engine_info())
            async with asyncio.timeout(20):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        engine.close()
    shutil.rmtree(channels.run_dir)
