"""Ranks that share a model compute with an adapter what one rank computes."""

import os

import pytest
import torch

import radixrt_kernels
from radixrt.layers.parallel import TensorParallel
from tests.adapters.peft_adapters import make_adapter
from tests.checkpoints import make_checkpoint
from tests.models.ranks import Ranks, run_ranks
from tests.models.tp_rank import Job, compute

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="adapters are computed by the native kernels"
)

JOBS = {
    "llama": ("llama", 1),
    "qwen3_moe": ("qwen3_moe", 1),
    "gpt_oss_by_experts": ("gpt_oss", 2),
    "deepseek_v3": ("deepseek_v3", 1),
    "qwen3_5": ("qwen3_5", 1),
}
"""Families, and groups of ranks over which their experts are spread."""
if "RADIXRT_ADAPTERS" in os.environ:
    JOBS |= {"qwen3_moe_by_experts": ("qwen3_moe", 2), "granite_hybrid": ("granite_hybrid", 1)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder, jobs = tmp_path_factory.mktemp("ranks"), {}
    for name, (family, groups) in JOBS.items():
        model = make_checkpoint(family, folder / name, initializer_range=0.06)
        make_adapter(model, folder / f"{name}.lora", None, size=0.3)
        adapter = str(folder / f"{name}.lora")
        jobs[name] = Job(str(model), expert_groups=groups, native=True, adapter=adapter)
    return run_ranks(2, jobs, folder)


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_give_the_logits_of_one(ranks: Ranks, job: str) -> None:
    alone = compute(ranks.jobs[job], TensorParallel())
    for result in ranks.results(job):
        torch.testing.assert_close(result.logits, alone.logits, atol=1e-4, rtol=0)
