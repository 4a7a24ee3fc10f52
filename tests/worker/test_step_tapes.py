"""A replayed step computes, bit for bit, what the model's forward pass computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import radixrt_kernels
from radixrt.attention.backend import ForwardContext
from radixrt.attention.cpu import CpuBackend
from radixrt.attention.setup import AttentionSetup
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from radixrt.worker import step_tapes
from radixrt.worker.step_tapes import COMPUTED_BEFORE_WITH_PROMPTS, StepTapes
from radixrt_kernels import tape
from tests.checkpoints import CONFIGS
from tests.models.harness import Harness, Sequence, with_forward

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

STEPS_WITH_PROMPTS = COMPUTED_BEFORE_WITH_PROMPTS + 3

PROMPTS = [list(range(3, 30)), list(range(40, 45)), list(range(100, 133))]


def taped(model: CausalLM) -> CausalLM:
    """The model with a forward pass that goes by tapes."""
    tapes: list[StepTapes] = []

    def forward(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        if not tapes:
            tapes.append(StepTapes(model, context))
        with torch.inference_mode():
            return tapes[0].forward(token_ids, positions, rows)

    return with_forward(model, forward)


def answers(model: CausalLM) -> list[torch.Tensor]:
    """Logits of steps of two prompts, of all, of one, and of one with a piece of another's prompt; then such steps again, of which the
    last row of each is wanted."""
    setup = AttentionSetup(specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype)
    harness = Harness(model, page_size=4, backend=CpuBackend(setup))
    sequences = [Sequence() for _ in PROMPTS]
    found = harness.step(list(zip(sequences, PROMPTS, strict=True)))
    for step in range(5):
        for members in (sequences[:2], sequences, sequences[2:]):
            found += harness.step([(sequence, [7 + step]) for sequence in members])
        found += harness.step([(sequences[0], [11]), (sequences[1], [12, 13 + step])])
    for step in range(STEPS_WITH_PROMPTS):
        work = [(sequences[2], [11]), (sequences[1], [12, 13 + step])]
        found.append(model.logits(harness.hidden(work, torch.tensor([0, 2]))))
    return found


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_computes_the_same(
    checkpoint: Callable[[str], Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoint(architecture), kernels=NativeKernels())
    replays: list[int] = []
    replay = tape.Tape.replay

    def counted(self: tape.Tape, *inputs: torch.Tensor) -> torch.Tensor:
        replays.append(len(inputs[0]))
        return replay(self, *inputs)

    monkeypatch.setattr(tape.Tape, "replay", counted)
    expected, found = answers(model), answers(taped(model))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # The second step of each size is recorded, those after it are replays; with prompts they have tapes of their own.
    with_prompts = 2 if model.ends_by_rows else STEPS_WITH_PROMPTS
    assert {count: replays.count(count) for count in (1, 2, 3)} == {1: 3, 2: 3, 3: 8 + with_prompts}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama_biased_tied", "qwen3_moe"])
def test_quantized_models_compute_the_same(
    checkpoint: Callable[[str], Path], architecture: str, quantization: str, dtype: str
) -> None:
    folder = checkpoint(architecture)
    model = load_model(folder, quantization=quantization, dtype=dtype, kernels=NativeKernels())
    for ours, theirs in zip(answers(taped(model)), answers(model), strict=True):
        assert torch.equal(ours, theirs)


def test_no_recording_takes_more_memory_than_allowed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is of a step that is small for every model."""
    model = load_model(checkpoint("llama"), kernels=NativeKernels())
    recorded: list[int] = []
    record = tape.record

    def counted(compute: Any, *inputs: torch.Tensor, **memory: Any) -> Any:
        recorded.append(len(inputs[0]))
        return record(compute, *inputs, **memory)

    monkeypatch.setattr(tape, "record", counted)
    setup = AttentionSetup(specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype)
    harness = Harness(taped(model), page_size=16, backend=CpuBackend(setup))

    def compute(count: int) -> list[int]:
        for _ in range(STEPS_WITH_PROMPTS):
            harness.hidden([(Sequence(), [5] * count)], torch.tensor([count - 1]))
        return recorded

    assert compute(80) == [] and compute(16) == [16] and compute(80) == [16, 80]
    monkeypatch.setattr(step_tapes, "MOST_RECORDED_BYTES", 1)
    assert compute(96) == [16, 80]
