"""Two ranks compute the logits that one computes."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import children
from radixrt.base.errors import ConfigError
from radixrt.layers.linear import Heads
from radixrt.layers.parallel import TensorParallel
from radixrt.models.loader import load_model
from tests.checkpoints import make_checkpoint
from tests.models.tp_rank import logits

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]

JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "auto", {}),
    "biases_and_tied_embeddings": ("llama_biased_tied", "auto", {}),
    "fewer_kv_heads_than_ranks": ("llama", "auto", {"num_key_value_heads": 1}),
    "odd_vocabulary": ("llama", "auto", {"vocab_size": 383}),
    "qwen2": ("qwen2", "auto", {}),
    "qwen3_moe": ("qwen3_moe", "auto", {}),
    "gemma2": ("gemma2", "auto", {}),
    "phi3": ("phi3", "auto", {}),
    "olmo2": ("olmo2", "auto", {}),
    "olmo2_with_fewer_kv_heads": ("olmo2", "auto", {"num_key_value_heads": 1}),
    "glm4_moe": ("glm4_moe", "auto", {}),
    "deepseek_v2": ("deepseek_v2", "auto", {}),
    "deepseek_v3": ("deepseek_v3", "auto", {}),
    "gemma4_e": ("gemma4_e", "auto", {}),
    "gpt_oss": ("gpt_oss", "auto", {}),
    "dummy_llama": ("llama", "dummy", {}),
    "dummy_qwen3_moe": ("qwen3_moe", "dummy", {}),
}
"""Name to architecture, load format and what its config has beside the usual."""


@dataclass
class Ranks:
    """What two ranks computed."""

    folder: Path

    def logits(self, job: str, rank: int) -> torch.Tensor:
        return torch.load(self.folder / f"{job}.out.{rank}", weights_only=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """All jobs in one pair of processes: starting them costs more than the work."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [str(folder / "store")]
    for job, (architecture, load_format, overrides) in JOBS.items():
        make_checkpoint(architecture, folder / job, **overrides)
        arguments.append(f"{folder / job},{load_format},{folder / job}.out")
    processes = [
        children.start(
            [sys.executable, "-m", "tests.models.tp_rank", str(rank), "2", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            children.end(process, timeout_s=0)
    return Ranks(folder)


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_give_the_logits_of_one(ranks: Ranks, job: str) -> None:
    alone = logits(ranks.folder / job, TensorParallel(), JOBS[job][1])
    for rank in range(2):
        torch.testing.assert_close(ranks.logits(job, rank), alone, atol=1e-4, rtol=0)


def test_ranks_that_outnumber_the_kv_heads_share_them() -> None:
    first = [Heads.for_rank(8, 2, 64, TensorParallel(rank, 4)).first_kv for rank in range(4)]
    assert first == [0, 0, 1, 1]


def test_heads_that_do_not_divide_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"attention heads \(4\).*--tp 3"):
        load_model(checkpoint("llama"), tp=TensorParallel(0, 3))
