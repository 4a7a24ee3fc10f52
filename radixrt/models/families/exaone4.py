"""EXAONE 4: norms behind the blocks and on each head of query and key; layers without a window do
not rotate."""

from typing import Any

from radixrt.layers.hf_config import head_dim, sliding_window
from radixrt.models.decoder import CausalLM, PostNormDecoderLayer


class Exaone4ForCausalLM(CausalLM):
    """The 32B model has windows in three of four layers. The 1.2B model has none, and rotates in
    all layers."""

    layer_class = PostNormDecoderLayer

    def attention_options(self, index: int) -> dict[str, Any]:
        window = sliding_window(self.config, index)
        return {
            "query_norm": self.norm(head_dim(self.config)),
            "key_norm": self.norm(head_dim(self.config)),
            "sliding_window": window,
            "rotates": self.config.sliding_window is None or window is not None,
        }
