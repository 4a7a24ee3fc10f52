"""EAGLE-3 heads (Li et al., 2025): one decoder layer that drafts tokens from hidden states of the
model.

The input at a token is its embedding, and a state: of three hidden states of the model behind the
token before it, ``fc`` makes one. Where the model has not computed that token yet, the layer's own
output stands for the state. The head has a small vocabulary of its own, whose ids a map translates.

Two formats are read. In those of EAGLE's authors and SGLang the layer is ``midlayer``, and the
layers whose *outputs* are read may stand in ``eagle_config``. In those of vLLM's speculators it is
``layers.0``, sizes stand in ``transformer_layer_config``, and ids of layers mean their *inputs*.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.base.errors import ConfigError
from radixrt.layers.attention import SelfAttention
from radixrt.layers.hf_config import head_dim
from radixrt.layers.kernels.interface import LayerKernels, use_kernels
from radixrt.layers.linear import (
    RowParallelLinear,
    VocabParallelEmbedding,
    allocate_matrices,
    pack_matrices,
)
from radixrt.layers.mlp import GatedMLP
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.formats import matrix_formats
from radixrt.layers.quantization.scheme import QuantizationScheme
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import load_into, weight_slots
from radixrt.models.checkpoint import read_config
from radixrt.models.decoder import CausalLM
from radixrt.models.draft_head import DraftHead
from radixrt.models.loader import default_dtype, read_tensors

NUM_STATES = 3
"""Hidden states of the model for each token."""

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle", "Eagle3Speculator", "Eagle3DraftModel")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes of a head, under transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    """The residual stream begins with the normed state."""
    layers: tuple[int, ...]
    """Layers of the model whose inputs are read."""


def read_head_config(folder: Path, model: CausalLM) -> HeadConfig:
    """The config of a head for a model.

    Raises:
        ConfigError: it is no EAGLE-3 head, or does not fit the model.
    """
    raw = read_config(folder)
    sizes: dict[str, Any] = {**raw, **raw.get("transformer_layer_config", {})}
    names = raw.get("architectures") or [raw.get("speculators_model_type", "")]
    if not (set(names) & set(ARCHITECTURES) or raw.get("speculators_model_type") == "eagle3"):
        raise ConfigError(
            f"--draft-model {folder}: Not yet: {names[0] or 'a model without a name'}. EAGLE-3 heads are served "
            f"({ARCHITECTURES[0]}, {ARCHITECTURES[3]})."
        )
    try:
        config = _head_config(raw, sizes, model.config.num_hidden_layers, model.vocab_size)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json is not the config of a head: {error!r}") from error
    if sizes.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"--draft-model {folder}: Not yet: a head of several layers.")
    problems = {
        "states of {} features": (config.target_hidden_size, model.config.hidden_size),
        "a vocabulary of {}": (sizes["vocab_size"], model.vocab_size),
    }
    for what, (theirs, ours) in problems.items():
        if theirs != ours:
            raise ConfigError(
                f"--draft-model {folder} is for another model: it reads {what.format(theirs)}, "
                f"and this one has {what.format(ours)}."
            )
    most = model.config.num_hidden_layers - 1
    if len(config.layers) != NUM_STATES or not all(0 <= layer <= most for layer in config.layers):
        raise ConfigError(
            f"--draft-model {folder} reads the inputs of the layers {list(config.layers)}; of {NUM_STATES} layers from 0 to {most} they can be read."
        )
    return config


def _head_config(
    raw: dict[str, Any], sizes: dict[str, Any], num_layers: int, vocab_size: int
) -> HeadConfig:
    heads = sizes["num_attention_heads"]
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = raw.get("eagle_aux_hidden_state_layer_ids")
    if layers is None and nested:
        layers = [layer + 1 for layer in nested]
    return HeadConfig(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        hidden_act=sizes.get("hidden_act", "silu"),
        rms_norm_eps=float(sizes["rms_norm_eps"]),
        attention_bias=bool(sizes.get("attention_bias")),
        rope_parameters=_rope_parameters(sizes),
        max_position_embeddings=sizes.get("max_position_embeddings", 2048),
        target_hidden_size=raw.get("target_hidden_size") or sizes["hidden_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
        norm_before_residual=bool(raw.get("norm_before_residual")),
        layers=tuple(layers or (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))),
    )


def _rope_parameters(sizes: dict[str, Any]) -> dict[str, Any]:
    given = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or sizes.get("rope_theta") or 10000.0
    return {**given, "rope_type": rope_type, "rope_theta": float(theta)}


class Eagle3Layer(nn.Module):
    """Llama's layer, whose attention reads embedding and state side by side."""

    def __init__(self, config: HeadConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, eps, tp = config.hidden_size, config.rms_norm_eps, TensorParallel()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(
            config, 0, rotary, tp, input_size=2 * size, qkv_bias=config.attention_bias
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, tp, activation=config.hidden_act)

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        positions: Tensor,
        context: ForwardContext,
        wanted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream, each [rows or len(wanted), hidden_size], of
        embeddings and states [rows, hidden_size]. May overwrite ``states``."""
        normed = self.hidden_norm.forward(states)
        read = torch.cat((self.input_layernorm.forward(embedded), normed), dim=-1)
        residual = normed if self.norm_before_residual else states
        attended = self.self_attn.forward(read, positions, context)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        if not len(attended):
            return attended, residual
        hidden, residual = self.post_attention_layernorm.add_and_norm(attended, residual)
        return self.mlp.forward(hidden), residual


class Eagle3Head(DraftHead):
    """The whole head. Its embedding is the model's where it has none of its own."""

    drafter = "head"

    def __init__(
        self, config: HeadConfig, model: CausalLM, context_length: int, *, embeds: bool
    ) -> None:
        super().__init__()
        tp = TensorParallel()
        self.config = config
        self.reads = config.layers
        self.midlayer = Eagle3Layer(
            config, RotaryEmbedding(_rope_config(config), context_length, by_parts=True)
        )
        self.hidden_size = config.hidden_size
        self.state_size = NUM_STATES * config.target_hidden_size
        self.fc = RowParallelLinear(self.state_size, config.hidden_size, False, tp)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = VocabParallelEmbedding(config.draft_vocab_size, config.hidden_size, tp)
        self.embed_tokens = None
        if embeds:
            self.embed_tokens = VocabParallelEmbedding(model.vocab_size, config.hidden_size, tp)
        self._embed = model.model.embed_tokens.forward
        self.token_ids = torch.arange(config.draft_vocab_size)

    @property
    def attention(self) -> SelfAttention:
        return self.midlayer.self_attn

    @torch.inference_mode()
    def fuse(self, states: Tensor) -> Tensor:
        return self.fc.forward(states)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        states: Tensor,
        context: ForwardContext,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        embed = self._embed if self.embed_tokens is None else self.embed_tokens.forward
        embedded = embed(token_ids)
        hidden, residual = self.midlayer.forward(embedded, states, positions, context, wanted)
        return self.norm.add_and_norm(hidden, residual) if len(hidden) else (hidden, residual)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.logits(hidden)


def _rope_config(config: HeadConfig) -> Any:
    """What the rotary embedding reads."""
    if config.rope_parameters["rope_type"] == "default":
        return config
    from transformers import LlamaConfig

    names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    return LlamaConfig(
        **{name: getattr(config, name) for name in names},
        head_dim=head_dim(config),
        rope_parameters=dict(config.rope_parameters),
    )


def load_head(
    folder: Path,
    model: CausalLM,
    context_length: int,
    kernels: LayerKernels,
    scheme: QuantizationScheme | None = None,
) -> Eagle3Head:
    """Load a head, ready to run, in the dtype of its model.

    Args:
        scheme: by which the head's matrices are rounded; None: they stay plain.

    Raises:
        ConfigError: it cannot be served with this model.
    """
    config = read_head_config(folder, model)
    tensors = dict(_renamed(folder))
    embeds = "embed_tokens.weight" in tensors
    if not embeds and config.hidden_size != model.config.hidden_size:
        raise ConfigError(f"--draft-model {folder} has no embedding of its hidden size.")
    with default_dtype(model.dtype):
        head = Eagle3Head(config, model, context_length, embeds=embeds).eval()
        allocate_matrices(head, matrix_formats(scheme, tied_head=False))
    offsets = tensors.pop("d2t", None)
    if offsets is not None:
        head.token_ids = _token_ids(folder, head.token_ids, offsets, model.vocab_size)
    elif config.draft_vocab_size != model.vocab_size:
        raise ConfigError(f"--draft-model {folder} has no map d2t of its vocabulary.")
    load_into(weight_slots(head), tensors.items(), {"t2d"})
    use_kernels(head, kernels)
    pack_matrices(head, kernels)
    return head


def _renamed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors under SGLang's names, without prefix."""
    for name, tensor in read_tensors(folder):
        name = name.removeprefix("model.")
        yield name.replace("layers.0.", "midlayer.", 1), tensor


def _token_ids(folder: Path, own: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
    """The model's ids of the head's, which the map gives as differences."""
    if offsets.shape == own.shape and not offsets.is_floating_point():
        token_ids = own + offsets
        if int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size:
            return token_ids
    raise ConfigError(
        f"--draft-model {folder}: the map d2t does not lead from {len(own)} ids to those of the model's vocabulary of {vocab_size}."
    )
