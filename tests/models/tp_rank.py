"""One rank of tensor-parallel models: ``python -m tests.models.tp_rank RANK SIZE STORE JOB ...``.

A job is ``CHECKPOINT,LOAD_FORMAT,OUT``: the rank saves to OUT.RANK the logits of a prompt and of a
decode step after it. A process of its own, as a worker is.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from radixrt.layers.parallel import TensorParallel
from radixrt.models.loader import load_model
from tests.models.harness import Harness, Sequence

PROMPT = [(7 * i * i + 11) % 380 + 3 for i in range(30)]
NEXT = 42


def logits(model_dir: Path, tp: TensorParallel, load_format: str) -> torch.Tensor:
    harness = Harness(load_model(model_dir, tp=tp, load_format=load_format), page_size=4)
    sequence = Sequence()
    return torch.cat([harness.step([(sequence, tokens)])[0] for tokens in (PROMPT, [NEXT])])


def main(rank: int, size: int, store: str, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for job in jobs:
        model_dir, load_format, out = job.split(",")
        torch.save(
            logits(Path(model_dir), TensorParallel(rank, size), load_format), f"{out}.{rank}"
        )
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    os._exit(
        0
    )  # gloo's threads now and then abort a process that tears them down on a busy machine
