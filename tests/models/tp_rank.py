"""The ranks of tensor-parallel models: ``python -m tests.models.tp_rank SIZE STORE JOBS.json``.

Each rank, a process of its own as a worker is, saves what it computed of each :class:`Job` to OUT.RANK. They are
forked once torch is imported, which takes longer than their work.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.mlp import Experts
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import weight_bytes
from radixrt.models.adapters import ModelAdapters
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from radixrt.worker.replays import with_adapters
from tests.models.harness import Harness, Sequence, with_forward

PROMPT = [(7 * i * i + 11) % 380 + 3 for i in range(30)]
STEPS = 6
"""Greedy decode steps behind the prompt."""


class Job(msgspec.Struct, frozen=True):
    """A model and how it is loaded."""

    model: str
    out: str = ""
    load_format: str = "auto"
    quantization: str = "auto"
    expert_groups: int = 1
    native: bool = False
    """By the native kernels, not PyTorch's."""
    adapter: str = ""
    """The LoRA adapter of all tokens; empty: none."""


class Result(msgspec.Struct, frozen=True):
    """What a rank computed."""

    logits: torch.Tensor
    """Of the prompt and of greedy steps behind it: [30 + 6, vocab_size]"""
    expert_bytes: int
    """Memory of this rank's experts."""

    @property
    def tokens(self) -> list[int]:
        return self.logits.argmax(-1).tolist()


def compute(job: Job, tp: TensorParallel) -> Result:
    kernels = NativeKernels() if job.native else LayerKernels()
    model = load_model(
        Path(job.model),
        tp=tp,
        load_format=job.load_format,
        quantization=job.quantization,
        kernels=kernels,
    )
    if job.adapter:
        model = with_adapter(model, Path(job.adapter))
    harness, sequence = Harness(model, page_size=4), Sequence()
    steps = [harness.step([(sequence, PROMPT)])[0]]
    for _ in range(STEPS):
        steps += harness.step([(sequence, [int(steps[-1][-1].argmax())])])
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return Result(torch.cat(steps), sum(map(weight_bytes, experts)))


def with_adapter(model: CausalLM, folder: Path) -> CausalLM:
    """The model, all of whose tokens have an adapter."""
    adapters = ModelAdapters(model, num_adapters=2, max_rank=32)
    adapters.put(1, adapters.read(folder))

    def forward(ids: torch.Tensor, positions: torch.Tensor, context: Any, rows: Any) -> Any:
        places = torch.ones_like(ids)
        return with_adapters(model, context, adapters.rows, ids, positions, places)

    return with_forward(model, forward)


def main(rank: int, size: int, store: str, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for job in jobs:
        tp = TensorParallel(rank, size, expert_groups=job.expert_groups)
        result = compute(job, tp)
        torch.save((result.logits, result.expert_bytes), f"{job.out}.{rank}")
    dist.barrier()


if __name__ == "__main__":
    size, jobs = (
        int(sys.argv[1]),
        msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=list[Job]),
    )
    own, children = 0, []
    for rank in range(1, size):
        if (child := os.fork()) == 0:
            own, children = rank, []
            break
        children.append(child)
    code = 1
    try:
        main(own, size, sys.argv[2], jobs)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        # gloo's threads now and then abort a process that tears them down on a busy machine
        os._exit(code or next(filter(None, codes), 0))
