"""The decoder-only language model that every architecture here is an instance of.

An architecture's own file says how its layers are made up; this one says what happens to them: tokens
in, hidden states through the layers, logits out, weights loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from radixrt.attention.backend import AttentionSpec, ForwardContext
from radixrt.layers.attention import SelfAttention
from radixrt.layers.embedding import VocabParallelEmbedding
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import load_into, weight_slots
from radixrt.models.hf_config import head_dim


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream: Llama's layer.

    An architecture with another order of things brings a class of its own with this ``forward``.
    """

    def __init__(self, config: Any, self_attn: SelfAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations travel as the last block's output and the residual stream it is yet to join.

        Args:
            hidden, residual: [num_tokens, hidden_size]
            positions: [num_tokens]

        Returns:
            (hidden, residual) for the next layer
        """
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.self_attn(hidden, positions, context)
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual


def attention(
    config: Any, index: int, rotary: RotaryEmbedding, tp: TensorParallel, **options: Any
) -> SelfAttention:
    """The attention of layer ``index``, of the config's sizes; ``options`` are ``SelfAttention``'s."""
    return SelfAttention(
        index,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim(config),
        rotary,
        tp,
        **options,
    )


class DecoderModel(nn.Module):
    """Embedding, layers and final norm; holds what checkpoints name ``model.*``."""

    def __init__(
        self, config: Any, tp: TensorParallel, layers: Sequence[nn.Module], norm: RMSNorm
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(nn.Module):
    """A decoder with an LM head. Architectures subclass it once, to make up their layers."""

    num_parameters: int
    """Of the whole model, not of this rank's shards alone; set by the loader."""

    def __init__(
        self,
        config: Any,
        tp: TensorParallel,
        layers: Sequence[nn.Module],
        *,
        norm: RMSNorm | None = None,
        embedding_scale: float = 1.0,
        logit_soft_cap: float | None = None,
    ) -> None:
        """
        Args:
            config: transformers' config of the text model.
            layers: ``DecoderLayer`` or alike.
            norm: the final one, where it is not Llama's.
            embedding_scale: embeddings are multiplied by it (Gemma).
            logit_soft_cap: logits become ``cap * tanh(logits / cap)`` (Gemma 2).
        """
        super().__init__()
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.logit_soft_cap = logit_soft_cap
        norm = norm or RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model = DecoderModel(config, tp, layers, norm)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.dtype = torch.get_default_dtype()
        self.embedding_scale = torch.tensor(embedding_scale, device="cpu").item()
        # rounded to the dtype, as Gemma was trained

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Compute one step; the backend of ``context`` is planned for it.

        Args:
            input_ids: [num_tokens] of all sequences of the step, flat.
            positions: [num_tokens] of each token in its sequence.

        Returns:
            hidden states [num_tokens, hidden_size], for ``logits``
        """
        hidden = self.model.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        residual = torch.zeros_like(hidden)
        for layer in self.model.layers:
            hidden, residual = layer(hidden, residual, positions, context)
        return self.model.norm.add_and_norm(hidden, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary, on every rank.

        Args:
            hidden: [rows, hidden_size], those rows of ``forward``'s result that a token is wanted for.

        Returns:
            [rows, vocab_size] float32
        """
        head = self.lm_head if self.lm_head is not None else self.model.embed_tokens
        logits = head.logits(hidden).float()
        if self.logit_soft_cap is not None:
            logits = self.logit_soft_cap * torch.tanh(logits / self.logit_soft_cap)
        return logits

    def attention_specs(self) -> list[AttentionSpec]:
        """What each layer's KV cache and attention kernel must be like, on this rank."""
        return [block.spec for block in self.modules() if isinstance(block, SelfAttention)]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's tensors into the model.

        Raises:
            ConfigError: tensors are missing, unexpected or misshapen; names some of them.
        """
        renamed = (pair for name, tensor in tensors for pair in self.translate(name, tensor))
        ignored = {"lm_head.weight"} if self.lm_head is None else set()
        load_into(weight_slots(self), renamed, ignored)

    def translate(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's tensor under the names used here: renamed, split into several, or dropped."""
        yield name, tensor
