"""Gemma 3 (text): norms on query and key, and separate rotary embeddings for local and global
layers."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.hf_config import head_dim
from radixrt.layers.parallel import TensorParallel
from radixrt.models.gemma.gemma import GemmaForCausalLM
from radixrt.models.vision import language_model_only


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Five layers with a sliding window to one without; only the latter's rotary base is
    stretched."""

    is_causal = True

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        if getattr(config, "use_bidirectional_attention", False) is self.is_causal:
            raise ConfigError(
                "The checkpoint's architecture and its field 'use_bidirectional_attention' contradict each other: that of a "
                "model with attention in both directions is Gemma3TextModel."
            )
        super().__init__(config, tp, context_length)

    def attention_options(self, index: int) -> dict[str, Any]:
        norms = {name: self.norm(head_dim(self.config)) for name in ("query_norm", "key_norm")}
        return {**super().attention_options(index), **norms}

    def rope_layer_type(self, index: int) -> str | None:
        return self.config.layer_types[index]


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a checkpoint that also sees images; its vision part is left out."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config.text_config, tp, context_length)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from language_model_only(name, tensor)
