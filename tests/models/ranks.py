"""Runs the ranks of tensor-parallel models in processes, and reads what they computed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench import children
from tests.models.tp_rank import Job, Result

_ROOT = Path(__file__).parents[2]


@dataclass
class Ranks:
    """What the ranks computed."""

    size: int
    jobs: Mapping[str, Job]

    def results(self, name: str) -> list[Result]:
        """The results of a job, by rank."""
        out = self.jobs[name].out
        return [Result(*torch.load(f"{out}.{rank}")) for rank in range(self.size)]


def run_ranks(size: int, jobs: Mapping[str, Job], folder: Path) -> Ranks:
    """All jobs in one set of processes: starting them costs more than the work."""
    jobs = {
        name: msgspec.structs.replace(job, out=str(folder / f"{name}.out{size}"))
        for name, job in jobs.items()
    }
    file = folder / f"jobs{size}.json"
    file.write_bytes(msgspec.json.encode(list(jobs.values())))
    process = children.start(
        [
            sys.executable,
            "-m",
            "tests.models.tp_rank",
            str(size),
            str(folder / f"store{size}"),
            str(file),
        ],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stderr=subprocess.PIPE,
    )
    try:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    finally:
        children.end(process, timeout_s=0)
    return Ranks(size, jobs)
