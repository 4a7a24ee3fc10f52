"""The language models of Gemma 4: the dense models, those with experts beside the MLP, and those with an embedding
for each layer (E2B, E4B)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import KVSpec
from radixrt.base.errors import ConfigError
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.hf_config import sliding_window
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import (
    ColumnParallelLinear,
    Heads,
    LookUpTable,
    Projection,
    RowParallelLinear,
)
from radixrt.layers.mlp import Experts, GatedMLP, Router, gated_activation, split_fused_experts
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import parameter
from radixrt.models.decoder import CausalLM, DecoderModel, language_model_only
from radixrt.models.gemma import rounded


def kv_layer(config: Any, index: int) -> int:
    """The layer whose KV cache layer ``index`` reads: its own, or that of the last layer of its
    type that has one."""
    first_sharing = config.num_hidden_layers - config.num_kv_shared_layers
    kinds = config.layer_types
    of_kind = (i for i in range(first_sharing) if kinds[i] == kinds[index])
    return index if index < first_sharing else max(of_kind)


class Gemma4Attention(AttentionBlock):
    """Scores have no factor: the norms of query and key keep them in range. Values are normed too,
    without a weight.

    Where values are keys (``attention_k_eq_v``, in layers without a window), one projection gives
    both. They differ by their norms and the rotation, so both are cached.
    """

    def __init__(
        self, config: Any, index: int, rotary: RotaryEmbedding, tp: TensorParallel
    ) -> None:
        """
        Args:
            config: transformers' of the text model, with the sizes of each layer.
        """
        super().__init__()
        self.rotary = rotary
        self.kv_layer = kv_layer(config, index)
        self.owns_kv = self.kv_layer == index
        own = config.per_layer_config[index]
        size, eps = own.head_dim, config.rms_norm_eps
        heads = Heads.for_rank(own.num_attention_heads, own.num_key_value_heads, size, tp)
        window = sliding_window(config, index)
        self.spec = AttentionSpec(
            heads.query,
            heads.kv,
            size,
            scale=1.0,
            sliding_window=window,
            whole_images=window is not None,
        )
        query, key, value = heads.projections(own.num_attention_heads, own.num_key_value_heads, tp)
        values_are_keys = config.attention_k_eq_v and window is None
        kept = [key] if values_are_keys else [key, value]
        bias = config.attention_bias
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, [query, *(kept if self.owns_kv else ())], bias
        )
        self.q_norm = RMSNorm(size, eps)
        if self.owns_kv:
            self.k_norm = RMSNorm(size, eps)
            self.v_norm = RMSNorm(size, eps, learned=False)
        self.o_proj = RowParallelLinear(
            own.num_attention_heads * size, config.hidden_size, bias, tp
        )

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        return super().kv_spec(dtype) if self.owns_kv else KVSpec(())

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        merged = self.qkv_proj.forward(hidden)
        heads = merged.view(merged.shape[0], -1, self.spec.head_dim)
        query = self.q_norm.forward(heads[:, : self.spec.num_heads])
        key = value = None
        if self.owns_kv:
            kept = heads[:, self.spec.num_heads :]
            key = self.k_norm.forward(kept[:, : self.spec.num_kv_heads])
            value = self.v_norm.forward(kept[:, -self.spec.num_kv_heads :])
            query, key = self.rotary.forward(positions, query, key)
        else:
            query, _ = self.rotary.forward(positions, query, query[:, :0])
        kv_cache = context.kv_caches[self.kv_layer]
        attended = context.backend.attend(AttentionInputs(query, key, value, kv_cache, self.spec))
        return self.o_proj.forward(attended.flatten(1))


_OF_KV = (".k_proj.", ".v_proj.", ".k_norm.", ".v_norm.")


class Gemma4Router(nn.Module):
    """Chooses experts by the normed residual stream; each expert has a learned factor of its
    weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self.factor = hidden**-0.5
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.proj = Router(hidden, count, config.top_k_experts, normalize=True)
        self.per_expert_scale = parameter(count)

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.proj.choose(self.norm.forward(hidden) * self.factor)
        return weights * self.per_expert_scale[experts], experts


class Gemma4DecoderLayer(KernelLayer):
    """Attention, MLP with experts beside it perhaps, and perhaps an input of the layer for each
    token. The results of each are normed before they join the residual stream, which is multiplied
    by a learned number at the end."""

    def __init__(
        self, config: Any, self_attn: AttentionBlock, mlp: GatedMLP, experts: Experts | None
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        self.experts = experts
        if experts is not None:
            self.router = Gemma4Router(config)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
        if size := layer_input_size(config):
            self.activation = gated_activation(config.hidden_activation)
            gate = Projection.whole("per_layer_input_gate", size)
            self.per_layer_input_gate = ColumnParallelLinear(config.hidden_size, [gate], False)
            projection = Projection.whole("per_layer_projection", config.hidden_size)
            self.per_layer_projection = ColumnParallelLinear(size, [projection], False)
            self.post_per_layer_input_norm = norm()

    def attend(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The attention's output [num_tokens, hidden_size].

        Args:
            hidden: the residual stream [num_tokens, hidden_size]
            positions: [num_tokens]
        """
        normed = self.input_layernorm.forward(hidden)
        return self.self_attn.forward(normed, positions, context)

    def feed_forward(self, attended: Tensor, hidden: Tensor, layer_input: Tensor | None) -> Tensor:
        """The rest of the layer, row by row.

        Args:
            attended: [rows, hidden_size], some or all rows of :meth:`attend`'s
            hidden: the residual stream [rows, hidden_size]; may be overwritten.
            layer_input: [rows, size] of the models that have one.

        Returns:
            the residual stream [rows, hidden_size]
        """
        normed, hidden = self.pre_feedforward_layernorm.add_and_norm(
            self.post_attention_layernorm.forward(attended), hidden
        )
        output = self.mlp.forward(normed)
        if self.experts is not None:
            normed = self.pre_feedforward_layernorm_2.forward(hidden)
            beside = self.experts.forward(normed, self.router.choose(hidden))
            output = self.post_feedforward_layernorm_1.forward(output)
            output = output + self.post_feedforward_layernorm_2.forward(beside)
        hidden = hidden + self.post_feedforward_layernorm.forward(output)
        if layer_input is not None:
            gate = self.per_layer_input_gate.forward(hidden)
            gated = self.kernels.gated_activation(
                self.activation, torch.cat([gate, layer_input], dim=-1)
            )
            projected = self.per_layer_projection.forward(gated)
            hidden = hidden + self.post_per_layer_input_norm.forward(projected)
        return hidden * self.layer_scalar


def layer_input_size(config: Any) -> int:
    """Features of the input that each layer has for each token; 0: there is none."""
    return getattr(config, "hidden_size_per_layer_input", 0) or 0


class Gemma4Decoder(DecoderModel):
    """A decoder that also has the table and the projection of the layers' inputs."""

    def __init__(
        self, config: Any, tp: TensorParallel, layers: Sequence[nn.Module], norm: RMSNorm
    ) -> None:
        super().__init__(config, tp, layers, norm)
        self.input_size = size = layer_input_size(config)
        if not size:
            return
        all_layers = config.num_hidden_layers * size
        projection = Projection.whole("per_layer_model_projection", all_layers)
        self.embed_tokens_per_layer = LookUpTable(config.vocab_size_per_layer_input, all_layers, tp)
        self.input_scale = rounded(size**0.5)
        self.per_layer_model_projection = ColumnParallelLinear(
            config.hidden_size, [projection], False
        )
        self.projection_scale = config.hidden_size**-0.5
        self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_eps)

    def layer_inputs(self, input_ids: Tensor, embedded: Tensor) -> Sequence[Tensor | None]:
        """Inputs of each layer, [num_tokens, size]: the token's row in the layer's part of the
        table, and a projection of its embedding [num_tokens, hidden_size]."""
        if not self.input_size:
            return [None] * len(self.layers)
        rows = self.embed_tokens_per_layer.forward(input_ids) * self.input_scale
        projected = self.per_layer_model_projection.forward(embedded) * self.projection_scale
        projected = projected.unflatten(-1, (len(self.layers), self.input_size))
        normed = self.per_layer_projection_norm.forward(projected)
        return ((normed + rows.view_as(normed)) * 2.0**-0.5).unbind(1)


class Gemma4ForCausalLM(CausalLM):
    """The language model, also of a checkpoint that sees images or hears; its other parts are left
    out."""

    model: Gemma4Decoder
    decoder_class = Gemma4Decoder
    ends_by_rows = False

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        config = config.get_text_config()
        if config.use_bidirectional_attention == "all":
            raise ConfigError(
                "The checkpoint's field 'use_bidirectional_attention' is 'all': a Gemma 4 with attention in both directions is "
                "not supported."
            )
        super().__init__(config, tp, context_length)
        self.embedding_scale = rounded(config.hidden_size**0.5)
        self.logit_soft_cap = config.final_logit_softcapping
        self.first_sharing = config.num_hidden_layers - config.num_kv_shared_layers

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        config, experts = self.config, None
        if getattr(config, "enable_moe_block", False):
            hidden, size = config.hidden_size, config.moe_intermediate_size
            experts = Experts(config.num_experts, hidden, size, self.activation, self.tp)
        attention = Gemma4Attention(config, index, rotary, self.tp)
        return Gemma4DecoderLayer(config, attention, self.mlp(index), experts)

    def mlp(self, index: int) -> GatedMLP:
        config = self.config
        twice = config.use_double_wide_mlp and kv_layer(config, index) != index
        return self.gated_mlp(config.intermediate_size * (2 if twice else 1))

    def rope_layer_type(self, index: int) -> str | None:
        return self.config.layer_types[index]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self._run(input_ids, self.embed(input_ids), positions, context, rows)

    def _run(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
        *,
        narrows: bool = True,
    ) -> Tensor:
        """:meth:`forward` of embeddings [num_tokens, hidden_size].

        Args:
            narrows: layers that write no KV may leave out rows.
        """
        inputs = self.model.layer_inputs(input_ids, hidden)
        layer: Any  # Gemma4DecoderLayer
        for index, layer in enumerate(self.model.layers):
            if rows is not None and narrows and index == self.first_sharing:
                # No layer from here on writes KV, so the other rows are of no use any more.
                if not len(rows):
                    return hidden[rows]
                narrowed = context.narrowed(rows)
                if narrowed is not None:
                    context, hidden, positions = narrowed, hidden[rows], positions[rows]
                    inputs = [one if one is None else one[rows] for one in inputs]
                    rows = None
            layer_input = inputs[index]
            attended = layer.attend(hidden, positions, context)
            if rows is not None and layer is self.model.layers[-1]:
                if not len(rows):
                    return hidden[rows]
                attended, hidden = attended[rows], hidden[rows]
                layer_input = layer_input if layer_input is None else layer_input[rows]
            hidden = layer.feed_forward(attended, hidden, layer_input)
        return self.model.norm.forward(hidden)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Some checkpoints keep projections of keys and values for layers that have no use for
        them."""
        for ours, part in language_model_only(name, tensor):
            _, is_layer, rest = ours.partition("model.layers.")
            index = int(rest.partition(".")[0]) if is_layer else 0
            if kv_layer(self.config, index) == index or not any(kind in ours for kind in _OF_KV):
                ours = ours.replace(".router.scale", ".router.norm.weight")
                yield from split_fused_experts(ours, part)
