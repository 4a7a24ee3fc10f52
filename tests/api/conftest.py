"""A server without an engine: the real api and tokenizer, and a scheduler that follows a script."""

import contextlib
import dataclasses
import functools
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import pytest

from radixrt.api.server import serve
from radixrt.base.channels import Channels
from radixrt.base.config import MIN_RUNNING_REQUESTS, ServerConfig
from radixrt.base.liveness.link import SupervisorLink
from radixrt.messages.answers import EngineInfo
from radixrt.parsers.choice import with_parsers
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.compilers import compilers_on_demand
from tests.servers.engine_in_threads import EngineInThreads, Loop
from tests.servers.fake_scheduler import FakeScheduler, engine_info


@dataclasses.dataclass
class RunningServer:
    url: str
    scheduler: Any
    """A FakeScheduler, unless the test wants another."""
    vocabulary: Vocabulary

    def answer_with(self, text: str) -> None:
        """Let every answer be this text, then the end token."""
        ids = self.vocabulary.encode(text, add_special_tokens=False)
        self.scheduler.script = lambda request: [*ids, 1]

    def answer_endlessly(self, text: str = "the ") -> None:
        ids = self.vocabulary.encode(text, add_special_tokens=False)
        self.scheduler.script = lambda request: ids

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def info(self, check_invariants: bool = False) -> dict[str, Any]:
        """The answer of ``/get_server_info``."""
        params = {"check_invariants": "true"} if check_invariants else {}
        response = httpx.get(f"{self.url}/get_server_info", params=params, timeout=30)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def send(
    server: RunningServer,
    body: dict,
    receive_buffer: int | None = None,
    path: str = "/v1/completions",
) -> socket.socket:
    """Send a request, and leave its answer unread."""
    address = urlsplit(server.url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)
    return client


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


StartServer = Callable[..., RunningServer]


def _answers(url: str) -> bool:
    """Whether the server has heard from its engine."""
    try:
        urllib.request.urlopen(f"{url}/health", context=ssl._create_unverified_context()).close()
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False
    return True


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def starting(model_folder: Path) -> Iterator[StartServer]:
    """Starts servers that live until the block ends."""
    stops: list[Callable[[], None]] = []

    def start(
        info: EngineInfo | None = None,
        model: Path = model_folder,
        scheduler_type: Callable[..., Any] = FakeScheduler,
        **settings: object,
    ) -> RunningServer:
        defaults = {"served_model_name": "tiny", "tool_call_parser": "hermes"}
        config = with_parsers(ServerConfig(model_path=str(model), **{**defaults, **settings}))
        channels = Channels(Channels.make_run_dir())
        rows = config.max_running_requests or MIN_RUNNING_REQUESTS
        info = msgspec.structs.replace(info or engine_info(), max_running_requests=rows)
        given = (info, *([] if scheduler_type is FakeScheduler else [config]))
        engine = EngineInThreads(config, channels, lambda replica: scheduler_type(replica, *given))
        listen_socket = socket.create_server(("127.0.0.1", 0))
        port = listen_socket.getsockname()[1]
        api = Loop(lambda: serve(config, channels, listen_socket, SupervisorLink()))
        stops.extend((api.stop, engine.stop))
        server = RunningServer(f"http://127.0.0.1:{port}", engine.scheduler, engine.vocabulary)
        secure = server.url.replace("http", "https") if config.tls_cert else server.url
        wait_until(lambda: _answers(secure))
        return server

    def start_with_compilers_on_demand(*arguments: Any, **settings: Any) -> RunningServer:
        with compilers_on_demand():
            return start(*arguments, **settings)

    yield start_with_compilers_on_demand
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def start_server(model_folder: Path) -> Iterator[StartServer]:
    """Starts servers that live until the tests of a file are done."""
    with starting(model_folder) as start:
        yield start


@pytest.fixture(scope="session")
def shared_server(model_folder: Path) -> Iterator[RunningServer]:
    with starting(model_folder) as start:
        yield start()


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """A running server whose scheduler follows no test's script yet."""
    scheduler = shared_server.scheduler
    scheduler.step_s = scheduler.call_s = 0.0
    scheduler.refuse = lambda request: None
    scheduler.paused.clear()
    scheduler.requests.clear()
    scheduler.released.clear()
    scheduler.cache_calls.clear()
    shared_server.answer_with("Hello world")
    return shared_server
