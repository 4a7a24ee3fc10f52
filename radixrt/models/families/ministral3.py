"""Ministral 3: Mistral, whose queries grow with the logarithm of their position."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from radixrt.layers.parallel import TensorParallel
from radixrt.models.families.mistral import MistralForCausalLM
from radixrt.models.vision import language_model_only


class Ministral3ForCausalLM(MistralForCausalLM):
    """Queries within the original context are not scaled; those of its next lengths are, one step a
    length."""

    def attention_options(self, index: int) -> dict[str, Any]:
        grows = "llama_4_scaling_beta" in self.config.rope_parameters
        scale = self._query_scale if grows else None
        return {**super().attention_options(index), "query_scale": scale}

    def _query_scale(self, positions: Tensor) -> Tensor:
        rope = self.config.rope_parameters
        lengths = positions // rope["original_max_position_embeddings"]
        return 1.0 + rope["llama_4_scaling_beta"] * torch.log1p(lengths.float())


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The language model of a checkpoint that also sees images: Ministral 3, or Mistral Small 3.1,
    whose queries keep their scale."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config.text_config, tp, context_length)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from language_model_only(name, tensor)
