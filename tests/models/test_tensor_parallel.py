"""Two ranks compute the logits that one computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.base.errors import ConfigError
from radixrt.layers.linear import Heads
from radixrt.layers.parallel import TensorParallel
from radixrt.models.loader import load_model
from tests.checkpoints import make_checkpoint
from tests.models.ranks import Ranks, run_ranks
from tests.models.tp_rank import Job, compute

torch.set_num_threads(1)

RECURRENT = ["lfm2_moe", "qwen3_5", "qwen3_next", "granite_hybrid", "falcon_h1", "nemotron_h"]
ONE_GROUP = "norm_over_all_heads"
"""The model whose recurrent blocks each rank computes whole."""
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
    **{name: (name, "auto", {}) for name in RECURRENT},
    ONE_GROUP: ("granite_hybrid", "auto", {"mamba_n_groups": 1}),
    "dummy_llama": ("llama", "dummy", {}),
    "dummy_qwen3_moe": ("qwen3_moe", "dummy", {}),
}
"""Name to architecture, load format and what its config has beside the usual."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder, jobs = tmp_path_factory.mktemp("ranks"), {}
    for name, (architecture, load_format, overrides) in JOBS.items():
        model = make_checkpoint(architecture, folder / name, **overrides)
        jobs[name] = Job(str(model), load_format=load_format)
    return run_ranks(2, jobs, folder)


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_give_the_logits_of_one(ranks: Ranks, job: str) -> None:
    alone = compute(ranks.jobs[job], TensorParallel())
    for result in ranks.results(job):
        torch.testing.assert_close(result.logits, alone.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("job", [*RECURRENT, ONE_GROUP])
def test_a_rank_keeps_the_states_of_its_heads(ranks: Ranks, job: str) -> None:
    model = Path(ranks.jobs[job].model)
    whole, own = (load_model(model, tp=TensorParallel(0, n)).state_specs() for n in (1, 2))
    share = 1 if job == ONE_GROUP else 2
    assert [spec.num_bytes for spec in whole] == [share * spec.num_bytes for spec in own]


def test_ranks_that_outnumber_the_kv_heads_share_them() -> None:
    first = [Heads.for_rank(8, 2, 64, TensorParallel(rank, 4)).first_kv for rank in range(4)]
    assert first == [0, 0, 1, 1]


def test_heads_that_do_not_divide_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"attention heads \(4\).*--tp 3"):
        load_model(checkpoint("llama"), tp=TensorParallel(0, 3))
