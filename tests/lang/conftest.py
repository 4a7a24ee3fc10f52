"""The shared server and engine with the built-in model, as backends of the language."""

import pytest

import radixrt.lang as rl
from radixrt import LLM
from tests.servers import Server


@pytest.fixture(scope="session")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.fixture(scope="session")
def backend(server: Server) -> rl.Server:
    return rl.Server(server.url)


@pytest.fixture(scope="session")
def engine(demo_llm: LLM) -> rl.Engine:
    return rl.Engine(demo_llm)
