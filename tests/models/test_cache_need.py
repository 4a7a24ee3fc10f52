"""What a config.json says of a model's KV cache and states is what the model has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.base.config import ServerConfig
from radixrt.device.machine import OTHER_BYTES
from radixrt.models.cache_need import kv_numbers, state_bytes
from radixrt.models.checkpoint import read_config, text_config
from radixrt.models.loader import load_model
from radixrt.models.memory_need import engine_bytes
from tests.checkpoints import HYBRIDS

OTHERS = ["llama", "gemma3", "deepseek_v2"]


@pytest.mark.parametrize("architecture", [*OTHERS, *HYBRIDS])
def test_the_config_tells_the_memory_of_a_token_and_of_a_state(
    architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(architecture)
    model, text = load_model(folder, dtype="float32"), text_config(read_config(folder))
    assert 4 * kv_numbers(text) == sum(
        spec.bytes_per_token for spec in model.kv_specs(torch.float32)
    )
    assert state_bytes(text, 4) == sum(spec.num_bytes for spec in model.state_specs())


@pytest.mark.parametrize(
    ("architecture", "written"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M-*EME", "layers_block_type": None}),
        ("bamba", {"attn_layer_indices": [1], "layer_types": None, "layers_block_type": None}),
        ("lfm2", {"full_attn_idxs": [2], "layer_types": None}),
        ("granite_hybrid", {"layer_types": ["mamba", "mamba", "attention", "mamba"]}),
        ("granite_hybrid", {"mamba_d_head": "auto"}),
    ],
)
def test_the_layers_may_be_told_in_another_form(
    architecture: str, written: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    text = text_config(read_config(checkpoint(architecture)))
    other = {**text, **written}
    assert (kv_numbers(other), state_bytes(other, 2)) == (kv_numbers(text), state_bytes(text, 2))


def test_one_layer_of_four_has_attention_where_an_interval_says_so(
    checkpoint: Callable[[str], Path],
) -> None:
    text = text_config(read_config(checkpoint("qwen3_5")))
    listed = {**text, "num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 3, "x"] * 2}
    short = {**listed, "layer_types": None, "full_attention_interval": 4}
    assert (kv_numbers(short), state_bytes(short, 4)) == (
        kv_numbers(listed),
        state_bytes(listed, 4),
    )


def test_an_engines_need_has_its_states(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3_5")
    one_state = state_bytes(text_config(read_config(folder)), 4)
    config = ServerConfig(
        model_path=str(folder), max_total_tokens=64, max_running_requests=5, load_format="dummy"
    )
    need = engine_bytes(config, 1 << 30) - OTHER_BYTES
    assert need - 64 * 4 * kv_numbers(text_config(read_config(folder))) == 37 * one_state
