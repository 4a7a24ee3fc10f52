"""`make torture` runs this folder; a usual run leaves it out."""

import os
from pathlib import Path

import pytest

from tests.torture.checkpoint import make_reasoning_checkpoint

if "RADIXRT_TORTURE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reasoning_checkpoint(tmp_path_factory.mktemp("reasoning-llama"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent layers."""
    return make_reasoning_checkpoint(tmp_path_factory.mktemp("reasoning-hybrid"), "qwen3_5")
