"""Fixtures that several test folders use."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from radixrt import LLM
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.checkpoints import (
    END_OF_TURN,
    VOCAB_SIZE,
    make_checkpoint,
    make_served,
    make_tokenizer,
)
from tests.servers import Server, serving
from tests.servers.engine_in_threads import engines_in_threads
from tests.suite import (  # noqa: F401 (hooks)
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)

# Without a GPU, Triton kernels are interpreted. Triton reads this when a kernel's module is
# imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Engines compare the first replay of each tape of kernel calls with the forward pass.
os.environ["RADIXRT_CHECK_TAPES"] = "1"

# Tests are small, and several may run at once.
torch.set_num_threads(1)

# How long an example takes says how busy the machine is, not whether the code is right. The
# examples are the same in each run, but for those of `make test-scheduler`.
looks_for_new = "RADIXRT_SCHEDULER_EXAMPLES" in os.environ
# Tests that name no number of examples have 50.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=not looks_for_new, max_examples=50
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests and their servers keep of checkpoints is not kept in the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint("llama")``: the folder of a tiny checkpoint, made once a test run."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_checkpoint(
                architecture, tmp_path_factory.mktemp(architecture)
            )
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def model_dir(checkpoint: Callable[[str], Path]) -> Path:
    """The tiny Llama with a tokenizer."""
    return make_tokenizer(checkpoint("llama"))


@pytest.fixture(scope="session")
def facts(model_dir: Path) -> TokenizerFacts:
    """Of its tokenizer."""
    return TokenizerFacts.load(
        model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=(END_OF_TURN,)
    )


@pytest.fixture
def sigint() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, also where ``nohup`` has started it with
    SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Server]:
    """A server with the built-in model, in a cache of a modest size; tests leave nothing running or
    pinned on it."""
    with serving("demo", "--served-model-name", "demo", "--log-level", "warning", "--max-total-tokens", "65536", "--speculation", "auto") as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[LLM]:
    """An engine with the built-in model, in threads."""
    with engines_in_threads():
        llm = LLM(max_total_tokens=16384)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine with a tiny Llama, in processes of its own."""
    model_dir = make_served(tmp_path_factory.mktemp("llama"))
    with LLM(str(model_dir), page_size=4, max_total_tokens=8192) as llm:
        yield llm
