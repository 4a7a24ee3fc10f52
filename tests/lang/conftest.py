"""A real server with the built-in model, shared by the tests of the language."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixrt.lang as rl
from tests.server.conftest import Server, run_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = run_server(Path("demo"), "--served-model-name", "demo", "--log-level", "warning")
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(server.temp_dir)


@pytest.fixture(scope="session")
def backend(server: Server) -> rl.Server:
    return rl.Server(server.url)
