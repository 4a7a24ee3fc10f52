"""Models compute by the native kernels what they compute by PyTorch's, whose logits are transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import radixrt_kernels
from radixrt.layers.native_kernels import NativeKernels
from radixrt.models.loader import load_model
from tests.checkpoints import CONFIGS
from tests.models.harness import Harness

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
@pytest.mark.parametrize("architecture", ["llama_biased_tied", "gemma2", "qwen3_moe"])
def test_half_precision_is_as_close_to_float32_as_with_torch(
    checkpoint: Callable[[str], Path], architecture: str, dtype: str
) -> None:
    folder = checkpoint(architecture)
    exact = Harness(load_model(folder), page_size=16).logits(PROMPT)

    def error(kernels: NativeKernels | None) -> float:
        model = load_model(folder, dtype=dtype, kernels=kernels)
        return float((Harness(model, page_size=16).logits(PROMPT) - exact).square().mean().sqrt())

    assert error(NativeKernels()) < 1.25 * error(None)
