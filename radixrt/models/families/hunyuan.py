"""Hunyuan (dense): Llama with a norm on each head of query and key, behind the rotation."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from radixrt.layers.hf_config import head_dim
from radixrt.models.families.llama import LlamaForCausalLM

_NORMS = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Its checkpoints stretch the rotary base by a fixed ``alpha``, though they call it dynamic."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            **super().attention_options(index),
            "query_norm": self.norm(head_dim(self.config)),
            "key_norm": self.norm(head_dim(self.config)),
            "norm_after_rotation": True,
        }

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``query_layernorm`` and ``key_layernorm`` are ``q_norm`` and ``k_norm`` here, as in other
        models."""
        for theirs, ours in _NORMS.items():
            name = name.replace(theirs, ours)
        yield name, tensor
