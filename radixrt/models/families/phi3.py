"""Phi-3 and Phi-3.5 (text): Mistral with fused projections in the checkpoint, partial and long
rotary."""

from collections.abc import Iterator

from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.hf_config import head_dim
from radixrt.models.families.mistral import MistralForCausalLM


class Phi3ForCausalLM(MistralForCausalLM):
    """The 128k checkpoints use LongRoPE; ``radixrt.layers.rotary`` says how it is decided once."""

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``qkv_proj`` and ``gate_up_proj`` are cut into the projections they are made of."""
        config, dim = self.config, head_dim(self.config)
        query, key_value = config.num_attention_heads * dim, config.num_key_value_heads * dim
        fused = {
            "qkv_proj": {"q_proj": query, "k_proj": key_value, "v_proj": key_value},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        for whole, parts in fused.items():
            if f".{whole}." in name:
                if tensor.shape[0] != sum(parts.values()):
                    raise ConfigError(
                        f"The checkpoint's {name} has {tensor.shape[0]} rows; its config.json asks for "
                        f"{sum(parts.values())}."
                    )
                for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
                    yield name.replace(whole, part), rows
                return
        yield name, tensor
