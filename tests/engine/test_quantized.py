"""The engine serves quantized weights: its answers are the model's, and its numbers are true."""

from collections.abc import Callable
from pathlib import Path

import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.layers.weights import weight_bytes
from radixrt.models.loader import load_model
from tests.engine.in_process import InProcessEngine
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import Layout, quantize_checkpoint

PROMPTS = [list(range(3, 40)), list(range(50, 60)), list(range(3, 30))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_checkpoint(checkpoint: Callable[[str], Path], quantization: str) -> None:
    folder = checkpoint("llama_biased_tied")
    engine = InProcessEngine(folder, quantization=quantization)
    device = engine.runner._device.torch_device
    model = load_model(folder, quantization=quantization, kernels=layer_kernels(device))
    assert engine.info.weight_bytes == weight_bytes(model)
    assert engine.info.num_parameters == load_model(folder).num_parameters
    assert engine.generate(PROMPTS, GREEDY) == Harness(model, 16).generate(PROMPTS, 12)


def test_a_checkpoint_that_is_quantized(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    quantized, _ = quantize_checkpoint(
        checkpoint("llama"), tmp_path, Layout("gptq", act_order=True)
    )
    engine = InProcessEngine(quantized)
    model = load_model(quantized, kernels=layer_kernels(engine.runner._device.torch_device))
    assert engine.info.weight_bytes == weight_bytes(model)
    assert engine.generate(PROMPTS, GREEDY) == Harness(model, 16).generate(PROMPTS, 12)
