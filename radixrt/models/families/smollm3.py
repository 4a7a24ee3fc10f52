"""SmolLM3: Llama, of which every fourth layer does not rotate."""

from typing import Any

from radixrt.layers.hf_config import sliding_window
from radixrt.models.families.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """The config's ``no_rope_layers`` has a 1 for each layer that rotates, in spite of its name."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {
            **super().attention_options(index),
            "rotates": bool(self.config.no_rope_layers[index]),
            "sliding_window": sliding_window(self.config, index),
        }
