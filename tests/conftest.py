"""Fixtures that several test folders use."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.checkpoints import make_checkpoint

# Without a GPU, Triton kernels are interpreted. Triton reads this when a kernel's module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests are small, and several may run at once.
torch.set_num_threads(1)

# How long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


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
