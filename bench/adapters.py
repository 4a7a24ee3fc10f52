"""What LoRA adapters add to a decode step: the steps of a batch of the base model, of one adapter
and of as many adapters as sequences, in turn, on a checkpoint without weights. The exit status is 1
if a step takes longer than it may.

    python -m bench.adapters --batch 1 8 --rank 16 --rounds 9
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import CPU
from radixrt.layers.lora import LowRank
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.adapters import NO_ADAPTER
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, Prefill, StepPlan
from radixrt.models.adapters import Adapter, ModelAdapters, projections
from radixrt.worker.build import build_runner
from radixrt.worker.runner import ModelRunner

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""0.4 B parameters."""
CONTEXT, STEPS = 64, 30


def random_adapter(model: ModelAdapters, rank: int) -> Adapter:
    """An adapter of every linear layer."""
    pairs = {}
    for name, placement in projections(model.model):
        rows, columns = placement.size
        pairs[name] = LowRank(torch.randn(rank, columns) * 0.01, torch.randn(rows, rank) * 0.01)
    return Adapter("", pairs, rank)


def seconds_a_step(runner: ModelRunner, places: list[int], step_id: int) -> tuple[float, float]:
    """Median wall time, and mean CPU time, of the decode steps of a batch.

    Args:
        places: of the adapter of each sequence.
    """
    pages = CONTEXT // 16 + STEPS // 16 + 2
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 2, ignore_eos=True)
    admit, prefill = [], []
    for slot, place in enumerate(places):
        ids = pack_ids(np.arange(CONTEXT, dtype=np.int32))
        own = pack_ids(range(slot * pages, (slot + 1) * pages))
        admit.append(Admit(slot, ids, 0, own, sampling, 0, adapter=place))
        prefill.append(Prefill(slot, 0, CONTEXT))
    runner.step(StepPlan(step_id=step_id, admit=admit, prefill=prefill))
    walls, cpu = [], time.process_time()
    for number in range(STEPS):
        begin = time.perf_counter()
        runner.step(StepPlan(step_id=step_id + 1 + number))
        walls.append(time.perf_counter() - begin)
    cpu = (time.process_time() - cpu) / STEPS
    for slot in range(len(places)):
        runner._batch.release(slot)
        runner._forget(slot)
    return statistics.median(walls), cpu


BARS = {"one adapter": 1.10, "an adapter each": 1.25}
"""Most times that a step may take of the base's."""


@dataclass(frozen=True)
class Ratio:
    """Times that steps of a kind took of those of the base model in the same round."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(seconds: list[float], base: list[float]) -> "Ratio":
        found = sorted(one / other for one, other in zip(seconds, base, strict=True))
        return Ratio(statistics.median(found), found[0], found[-1])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


def compare(runner: ModelRunner, batch: int, rounds: int, first_step: int) -> bool:
    """Measure a batch; print the result of each kind. Returns whether all bars are met."""
    kinds = {"base": [NO_ADAPTER] * batch, "one adapter": [0] * batch}
    if batch > 1:
        kinds["an adapter each"] = list(range(batch))
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name in kinds if number % 2 else reversed(kinds):
            wall, cpu = seconds_a_step(runner, kinds[name], first_step + 100 * number)
            if number:  # the first round makes the tapes
                walls[name].append(wall)
                times[name].append(cpu)
    are_met = True
    for name in kinds:
        wall = Ratio.of(walls[name], walls["base"])
        line = f"batch {batch}, {name:15} {1e3 * statistics.median(walls[name]):6.1f} ms a step"
        if name in BARS:
            is_met = wall.median <= BARS[name]
            are_met &= is_met
            line += f", {wall} of the base's; as CPU time {Ratio.of(times[name], times['base'])}"
            line += f"; at most {BARS[name]:.2f}: {'met' if is_met else 'missed'}"
        print(line, flush=True)
    return are_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    arguments = parser.parse_args()
    largest = max(arguments.batch)
    with tempfile.TemporaryDirectory() as folder:
        shape = {**SHAPE, "num_hidden_layers": arguments.layers}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = ServerConfig(
            model_path=folder,
            load_format="dummy",
            max_total_tokens=16 * 16 * largest,
            max_running_requests=largest,
            max_loras=largest,
            max_lora_rank=arguments.rank,
            speculation="off",
        )
        runner, _ = build_runner(config, CPU, TensorParallel(), Path("none"), print)
    assert runner._adapters is not None
    adapters = runner._adapters.adapters
    for place in range(largest):
        adapters.put(place, random_adapter(adapters, arguments.rank))
    met = [
        compare(runner, batch, arguments.rounds, 10_000 * index)
        for index, batch in enumerate(arguments.batch)
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
