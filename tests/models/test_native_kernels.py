"""Models compute by the native kernels what they compute by PyTorch's, whose logits are
transformers'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import radixrt_kernels
from radixrt.layers.kernels.interface import Choice, LayerKernels, Stacks
from radixrt.layers.kernels.native import GroupwiseExperts, NativeGroupwiseMatrix, NativeKernels
from radixrt.layers.matrix import Matrix, MatrixStack
from radixrt.layers.quantization.groupwise import GroupwiseMatrix
from radixrt.layers.weights import weight_bytes
from radixrt.models.loader import load_model
from radixrt_kernels.reference import groupwise
from tests.checkpoints import CONFIGS
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import quantize_checkpoint
from tests.models.test_quantized import LAYOUTS, MIXTURES, Layout, typical_error

torch.set_num_threads(1)
PROMPT = list(range(3, 33))

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_computes_the_same(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    folder = checkpoint(architecture)
    expected = Harness(load_model(folder), page_size=16).logits(PROMPT)
    native = Harness(load_model(folder, kernels=NativeKernels()), page_size=16)
    torch.testing.assert_close(native.logits(PROMPT, chunk=11), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama_biased_tied", "gemma2", "qwen3_moe", "gpt_oss"])
def test_half_precision_is_as_close_to_float32_as_with_torch(
    checkpoint: Callable[[str], Path], architecture: str, dtype: str
) -> None:
    folder = checkpoint(architecture)
    prompts = [PROMPT, *np.random.default_rng(0).integers(3, 380, (9, len(PROMPT))).tolist()]

    def logits(**options: Any) -> list[torch.Tensor]:
        model = load_model(folder, **options)
        return [Harness(model, page_size=16).logits(prompt) for prompt in prompts]

    exact = logits()

    def error(kernels: NativeKernels | None) -> float:
        """The median over rows. Where a rounding makes a router choose another expert, the error of
        a row is some forty times larger, with any kernels."""
        rounded = logits(dtype=dtype, kernels=kernels)
        errors = [(a - b).square().mean(-1).sqrt() for a, b in zip(rounded, exact, strict=True)]
        return float(torch.cat(errors).median())

    assert error(NativeKernels()) < 1.25 * error(None)


class RoundingMatrix(NativeGroupwiseMatrix):
    """What the kernel computes, in torch."""

    def multiply_packed(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return groupwise.linear(hidden, self.packed, bias)


class RoundingKernels(LayerKernels):
    def pack(self, matrix: Matrix) -> Matrix:
        return RoundingMatrix(matrix) if isinstance(matrix, GroupwiseMatrix) else matrix

    def pack_stack(self, matrix: Matrix, count: int) -> Matrix:
        return GroupwiseExperts(matrix, count) if isinstance(matrix, GroupwiseMatrix) else matrix

    def experts(
        self,
        hidden: torch.Tensor,
        choice: Choice,
        stacks: Stacks,
        activation: str,
        *,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Token by token and expert by expert."""
        assert not is_part
        (weights, experts), (gate_up, down) = choice, stacks

        def product(stack: MatrixStack, expert: int, row: torch.Tensor) -> torch.Tensor:
            assert isinstance(stack.matrix, GroupwiseExperts)
            matrix = groupwise.matrix_of(stack.matrix.packed, expert)
            return groupwise.linear(row, matrix, None if stack.bias is None else stack.bias[expert])

        output = torch.zeros_like(hidden)
        for token, choice in np.ndindex(*experts.shape):
            expert, row = int(experts[token, choice]), hidden[token : token + 1]
            activated = self.gated_activation(activation, product(gate_up, expert, row))
            output[token] += weights[token, choice] * product(down, expert, activated)[0]
        return output


def check_quantized(folder: Path, quantization: str = "auto", *, mixture: bool = False) -> None:
    native, expected, unrounded = (
        Harness(
            load_model(folder, quantization=quantization, kernels=kernels), page_size=16
        ).logits(PROMPT)
        for kernels in (NativeKernels(), RoundingKernels(), None)
    )
    # Where an activation lies between two whole numbers, the last bit of a sum decides.
    assert rms(native - expected) < 0.02 * expected.std()
    error = typical_error(native, unrounded) if mixture else rms(native - unrounded)
    assert error < 0.15 * unrounded.std()


def rms(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean().sqrt()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_quantized_checkpoints_compute_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, layout: Layout
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama_biased_tied"), tmp_path, layout)
    check_quantized(quantized)


@pytest.mark.parametrize(("architecture", "layout"), MIXTURES.values(), ids=MIXTURES)
def test_quantized_mixtures_of_experts_compute_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, layout: Layout
) -> None:
    quantized, _ = quantize_checkpoint(checkpoint(architecture), tmp_path, layout)
    check_quantized(quantized, mixture=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "architecture",
    ["llama", "llama_biased_tied", "gemma2", "qwen3_moe", "mixtral", "lfm2", "qwen3_5"],
)
def test_rounded_checkpoints_compute_the_same(
    checkpoint: Callable[[str], Path], architecture: str, quantization: str
) -> None:
    """The LM head and a tied embedding are among what is rounded."""
    check_quantized(checkpoint(architecture), quantization)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_packed_experts_take_what_their_weights_take(
    checkpoint: Callable[[str], Path], quantization: str
) -> None:
    """All matrices of this checkpoint but its vocabulary's are whole panels, so nothing is padded;
    and nothing is kept twice."""
    folder = checkpoint("mixtral")
    plain = load_model(folder, quantization=quantization)
    packed = load_model(folder, quantization=quantization, kernels=NativeKernels())
    for ours, theirs in zip(packed.model.layers, plain.model.layers, strict=True):
        assert weight_bytes(ours.mlp.experts) == weight_bytes(theirs.mlp.experts)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_rounded_mixtures_of_experts_compute_the_same(
    checkpoint: Callable[[str], Path], architecture: str, quantization: str
) -> None:
    check_quantized(checkpoint(architecture), quantization, mixture=True)
