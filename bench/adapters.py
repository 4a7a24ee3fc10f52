"""What LoRA adapters add to a decode step: the steps of a batch of the base model, of one adapter
and of as many adapters as sequences, in turn, on a checkpoint without weights.

    python -m bench.adapters --batch 8 --rank 16
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

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

SHAPE = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    batch = arguments.batch
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = ServerConfig(
            model_path=folder,
            load_format="dummy",
            max_total_tokens=16 * 16 * batch,
            max_running_requests=batch,
            max_loras=batch,
            max_lora_rank=arguments.rank,
            speculation="off",
        )
        runner, _ = build_runner(config, CPU, TensorParallel(), Path("none"), print)
    assert runner._adapters is not None
    for place in range(batch):
        runner._adapters.adapters.put(
            place, random_adapter(runner._adapters.adapters, arguments.rank)
        )
    kinds = {
        "base": [NO_ADAPTER] * batch,
        "one adapter": [0] * batch,
        f"{batch} adapters": list(range(batch)),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(arguments.rounds + 1):
        for name, places in kinds.items():
            found = seconds_a_step(runner, places, 100 * number)
            if number:  # the first round makes the tapes
                seen[name].append(found)
    base = [cpu for _, cpu in seen["base"]]
    for name, rows in seen.items():
        ratios = sorted(cpu / own for (_, cpu), own in zip(rows, base, strict=True))
        wall = statistics.median(wall for wall, _ in rows)
        print(
            f"{name:12} {1e3 * wall:6.1f} ms a step; CPU time / base: "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
