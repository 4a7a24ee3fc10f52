"""Rotary tables against transformers', for every way of stretching them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from radixrt.layers.rotary import FIRST_POSITIONS, RotaryEmbedding

_LENGTHS = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | _LENGTHS,
        {"rope_type": "yarn", "factor": 4.0} | _LENGTHS,
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3} | _LENGTHS,
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
        | _LENGTHS,
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5} | _LENGTHS,
        {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0, 3.0] * 6}
        | _LENGTHS,
        {"rope_type": "longrope", "factor": 6.0, "short_factor": [1.0] * 12}
        | {"long_factor": [2.0] * 12}
        | _LENGTHS,
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_the_table_is_transformers_for_a_sequence_as_long_as_the_context(
    parameters: dict[str, Any], length: int
) -> None:
    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(config, length)
    expected = torch.cat([cos[0, :, :12], sin[0, :, :12]], dim=-1)
    torch.testing.assert_close(ours.cos_sin, expected, atol=1e-5, rtol=0)


def test_a_table_that_is_computed_by_parts_has_the_bits_of_a_whole_one() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=4)
    whole = RotaryEmbedding(config, 5000).cos_sin
    by_parts = RotaryEmbedding(config, 5000, by_parts=True)
    assert torch.equal(by_parts.cos_sin[:FIRST_POSITIONS], whole[:FIRST_POSITIONS])
    assert not by_parts.cos_sin[-1].equal(whole[-1])  # not computed yet
    by_parts.compute_up_to(FIRST_POSITIONS + 1)
    by_parts.compute_up_to(4999)
    assert torch.equal(by_parts.cos_sin, whole)
