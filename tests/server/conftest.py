"""Real servers with a tiny Llama: all processes, on loopback."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_served
from tests.servers import Server, run_server, serving


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return make_served(folder)


@pytest.fixture(scope="module")
def start_server(served_checkpoint: Path) -> Iterator[Callable[..., Server]]:
    """``start_server("--page-size", "1")``: a server that answers; stopped when the tests of a file
    are done."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        server = run_server(served_checkpoint, "--served-model-name", "tiny", *flags)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.remove()


@pytest.fixture(scope="session")
def server(served_checkpoint: Path) -> Iterator[Server]:
    """One server that many tests share."""
    flags = ("--page-size", "4", "--max-total-tokens", "8192")
    with serving(served_checkpoint, "--served-model-name", "tiny", *flags) as server:
        yield server
