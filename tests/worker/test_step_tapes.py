"""A replayed step computes, bit for bit, what the model's forward pass computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import radixrt_kernels
from radixrt.attention.backend import AttentionSetup, ForwardContext
from radixrt.attention.cpu import CpuBackend
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from radixrt.worker.replays import StepTapes
from radixrt_kernels import tape
from tests.checkpoints import CONFIGS, make_checkpoint
from tests.models.harness import Harness, Sequence, with_forward

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

STEPS_WITH_PROMPTS = 4

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
    """Logits of steps of two prompts, of all, of one, and of one with a piece of another's prompt;
    then such steps again, of which the last row of each is wanted."""
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
    work = [(sequences[0], [11]), (Sequence(), list(range(3, 103)))]
    found.append(model.logits(harness.hidden(work, torch.tensor([0, 100]))))
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
    assert replays.count(101) == model.ends_by_rows
    assert {count: replays.count(count) for count in (1, 2, 3)} == {
        1: 5,
        2: 5,
        3: 10 + STEPS_WITH_PROMPTS,
    }


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama_biased_tied", "qwen3_moe"])
def test_quantized_models_compute_the_same(
    checkpoint: Callable[[str], Path], architecture: str, quantization: str, dtype: str
) -> None:
    folder = checkpoint(architecture)
    model = load_model(folder, quantization=quantization, dtype=dtype, kernels=NativeKernels())
    setup = AttentionSetup(specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype)
    harness = Harness(model, page_size=4, backend=CpuBackend(setup))
    assert StepTapes(model, harness.context)._tapes is not None
    for ours, theirs in zip(answers(taped(model)), answers(model), strict=True):
        assert torch.equal(ours, theirs)


def test_more_layers_need_no_more_memory(tmp_path: Path) -> None:
    """The tensors of one layer take the place of those of the layer before."""

    def num_bytes(layers: int) -> int:
        folder = make_checkpoint("llama", tmp_path / str(layers), num_hidden_layers=layers)
        model = load_model(folder, kernels=NativeKernels())
        setup = AttentionSetup(
            specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype
        )
        harness = Harness(model, page_size=16, backend=CpuBackend(setup))
        return len(StepTapes(model, harness.context)._memory)

    assert num_bytes(3) == num_bytes(8) > 0
