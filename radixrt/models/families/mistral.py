"""Mistral 7B and its successors: Llama, with a sliding window where the config says so."""

from typing import Any

from radixrt.models.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """All layers share one sliding window: 4,096 tokens in v0.1, none since v0.2."""

    def attention_options(self, index: int) -> dict[str, Any]:
        return {"sliding_window": self.config.sliding_window}
