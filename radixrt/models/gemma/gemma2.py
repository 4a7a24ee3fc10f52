"""Gemma 2: soft-capped scores and logits, a sliding window in every other layer."""

from typing import Any

from radixrt.layers.parallel import TensorParallel
from radixrt.models.gemma.gemma import GemmaForCausalLM


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Scores are capped before the mask, logits at the end."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.logit_soft_cap = config.final_logit_softcapping

    def attention_options(self, index: int) -> dict[str, Any]:
        return {**super().attention_options(index), "soft_cap": self.config.attn_logit_softcapping}
