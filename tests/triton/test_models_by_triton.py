"""Whole models by the GPU's kernels give the logits that PyTorch's give: views, writing in place
and all."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.kernels.gpu import GpuKernels
from radixrt.models.loader import load_model
from radixrt.worker import build
from tests.checkpoints import VOCAB_SIZE
from tests.engine.in_process import InProcessEngine
from tests.models.harness import Harness

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_models.py does this on a GPU"
)
PROMPT = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        ("llama_biased_tied", "auto"),
        ("qwen3", "auto"),
        ("gemma2", "auto"),
        ("gemma3", "auto"),
        ("phi3", "auto"),
        ("qwen3_moe", "auto"),
        ("mixtral", "auto"),
        ("llama", "int4"),
        ("qwen3", "int8"),
        ("llama", "fp8"),
    ],
)
def test_logits(checkpoint: Callable[[str], Path], architecture: str, quantization: str) -> None:
    folder = checkpoint(architecture)
    expected = Harness(load_model(folder, quantization=quantization), 16).logits(PROMPT, 7)
    model = load_model(folder, quantization=quantization, kernels=GpuKernels(None))
    torch.testing.assert_close(Harness(model, 16).logits(PROMPT, 7), expected, atol=2e-4, rtol=0)


def test_a_worker_gives_the_tokens_that_it_gives_without(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:]]
    expected = InProcessEngine(checkpoint("qwen3")).generate(prompts)
    monkeypatch.setattr(build, "layer_kernels", lambda device: GpuKernels(None))
    assert InProcessEngine(checkpoint("qwen3")).generate(prompts) == expected
