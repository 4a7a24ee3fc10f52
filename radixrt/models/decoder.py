"""The decoder-only language model that every architecture derives from.

An architecture's own file overrides how its layers are made. This file runs them: tokens in, hidden
states through the layers, logits out; and it loads the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import KVSpec
from radixrt.attention.states import StateSpec
from radixrt.layers.attention import AttentionBlock, SelfAttention
from radixrt.layers.hf_config import head_dim
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import VocabParallelEmbedding
from radixrt.layers.mlp import Experts, GatedMLP, Router, SparseMoE
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.recurrent import RecurrentBlock
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import load_into, weight_slots


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream: Llama's layer.

    Layers call one another's methods: torch's own call looks for hooks, which costs the host as
    much as a launch.

    An architecture with another order of norms and blocks has a class of its own with these two
    methods.
    """

    def __init__(self, config: Any, self_attn: AttentionBlock, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention. The last block's output and the residual stream are added in the
        next norm.

        Args:
            hidden, residual: [num_tokens, hidden_size], of the layer before
            positions: [num_tokens]

        Returns:
            (hidden, residual) for :meth:`feed_forward`
        """
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        return self.self_attn.forward(hidden, positions, context), residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the MLP, row by row.

        Args:
            hidden, residual: [rows, hidden_size], some or all rows of :meth:`attend`'s

        Returns:
            (hidden, residual) for the next layer
        """
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp.forward(hidden), residual


class PostNormDecoderLayer(nn.Module):
    """Attention and MLP read the residual stream as it is; their outputs are normed before they
    join it (OLMo 2)."""

    def __init__(self, config: Any, self_attn: AttentionBlock, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attend(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        residual = residual + hidden
        return self.self_attn.forward(residual, positions, context), residual

    def feed_forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.post_attention_layernorm.forward(hidden)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(residual)), residual


class DecoderModel(nn.Module):
    """Embedding, layers and final norm: the tensors that checkpoints name ``model.*``."""

    def __init__(
        self, config: Any, tp: TensorParallel, layers: Sequence[nn.Module], norm: RMSNorm
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(KernelLayer):
    """A decoder with an LM head: Llama's without biases. Architectures override the methods in
    which they differ."""

    num_parameters: int
    """Parameters of the whole model, not of this rank's shards alone; set by the loader."""
    layer_class: Callable[[Any, AttentionBlock, nn.Module], nn.Module] = DecoderLayer
    """Makes a layer of (config, attention, MLP)."""
    decoder_class: Callable[..., DecoderModel] = DecoderModel
    """Makes embedding, layers and final norm, as ``DecoderModel`` does."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it (Gemma)."""
    logit_divisor: float = 1.0
    """Logits are divided by it (Granite)."""
    activation = ""
    """Of MLPs and experts, by transformers' name; "": the config's."""
    rope_interleaved = False
    """The rotated pairs are neighbours in a head, see ``RotaryEmbedding``."""
    logit_soft_cap: float | None = None
    """Logits become ``cap * tanh(logits / cap)`` (Gemma 2)."""
    generates = True
    """False: it has no LM head, see :meth:`replace_head`."""
    has_transposed_experts = False
    """Checkpoints keep the matrices of all experts with input features first."""
    ends_by_rows = True
    """``forward`` is :meth:`up_to_last_attention` of all tokens, and :meth:`after_last_attention`
    of the rows that are wanted."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.vocab_size: int = config.vocab_size
        self.dtype = torch.get_default_dtype()
        of_config: Any = getattr(config, "hidden_activation", None) or getattr(
            config, "hidden_act", ""
        )
        self.activation = self.activation or of_config
        kinds = [self.rope_layer_type(index) for index in range(config.num_hidden_layers)]
        rotaries = {kind: self.rotary(context_length, kind) for kind in set(kinds)}
        self._rotaries = list(rotaries.values())
        layers = [self._layer(index, rotaries[kind]) for index, kind in enumerate(kinds)]
        self.model = type(self).decoder_class(config, tp, layers, self.norm(config.hidden_size))
        self.score: nn.Linear | None = None
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)

    # ------------------------------------------------------------ overridden by architectures

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        """The attention of layer ``index``, whose KV cache is ``context.kv_caches[index]``. A
        family with another kind of attention overrides this with a block of its own, whose
        ``kv_spec`` describes its KV cache."""
        return SelfAttention(self.config, index, rotary, self.tp, **self.attention_options(index))

    def attention_options(self, index: int) -> dict[str, Any]:
        """Arguments of ``SelfAttention`` beside the config's sizes, for layer ``index``."""
        return {}

    def mlp(self, index: int) -> nn.Module:
        """The MLP of layer ``index``."""
        bias = getattr(self.config, "mlp_bias", False)
        return self.gated_mlp(self.config.intermediate_size, bias=bias)

    def norm(self, size: int) -> RMSNorm:
        """The final norm, and those of query and key where there are any."""
        return RMSNorm(size, self.config.rms_norm_eps)

    def head_norms(self) -> dict[str, RMSNorm]:
        """Norms on each head of query and key, as ``SelfAttention`` takes them."""
        size = head_dim(self.config)
        return {"query_norm": self.norm(size), "key_norm": self.norm(size)}

    def rope_layer_type(self, index: int) -> str | None:
        """The key of layer ``index`` in the config's ``rope_parameters``; None: these are the same
        for all layers."""
        return None

    def rotary(self, context_length: int, layer_type: str | None) -> RotaryEmbedding:
        """The rotary embedding of layers of this type."""
        return RotaryEmbedding(
            self.config, context_length, layer_type, self.rope_interleaved, by_parts=True
        )

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint's tensor under the names used here: renamed, split into several, or
        dropped."""
        yield name, tensor

    # ------------------------------------------------------------ inherited by them

    def gated_mlp(self, size: int, *, bias: bool = False) -> GatedMLP:
        """A dense MLP with ``size`` features inside."""
        hidden = self.config.hidden_size
        return GatedMLP(hidden, size, self.tp, activation=self.activation, bias=bias)

    def mixture(self, router: Router, size: int, *shared: Any, bias: bool = False) -> SparseMoE:
        """Experts with ``size`` features inside each, and what :class:`SparseMoE` takes beside."""
        hidden, count = self.config.hidden_size, router.num_experts
        experts = Experts(count, hidden, size, self.activation, self.tp, bias)
        return SparseMoE(router, experts, *shared)

    def _layer(self, index: int, rotary: RotaryEmbedding) -> nn.Module:
        return self._layer_around(self.attention(index, rotary), index)

    def _layer_around(self, attention: AttentionBlock, index: int) -> nn.Module:
        """A layer of an attention, with norms and MLP as layer ``index`` has them."""
        return type(self).layer_class(self.config, attention, self.mlp(index))

    def further_layer(self, context_length: int) -> nn.Module:
        """A layer like the last one, with attention, whose KV cache is the first of its context: it
        predicts further tokens, and is no part of the model."""
        last = self.config.num_hidden_layers - 1
        rotary = self.rotary(context_length, self.rope_layer_type(last))
        return self._layer_around(self.attention(0, rotary), last)

    def prepare_positions(self, end: int) -> None:
        """Call before a step with positions from ``rotary.FIRST_POSITIONS`` on."""
        for rotary in self._rotaries:
            rotary.compute_up_to(end)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute one step; the backend of ``context`` is planned for it.

        Args:
            input_ids: [num_tokens] of all sequences of the step, flat.
            positions: [num_tokens] of each token in its sequence.
            rows: int64, the tokens whose hidden states are wanted; None: all. After the last
                attention, nothing is computed for the others.

        Returns:
            hidden states [num_tokens or len(rows), hidden_size], for ``logits``
        """
        hidden, residual = self.up_to_last_attention(input_ids, positions, context)
        if rows is not None:
            hidden, residual = hidden[rows], residual[rows]
        return self.after_last_attention(hidden, residual)

    @torch.inference_mode()
    def up_to_last_attention(
        self, input_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """The part of :meth:`forward` that every token needs: its keys and values are in the KV
        cache afterwards.

        Returns:
            (hidden, residual), each [num_tokens, hidden_size], for :meth:`after_last_attention`
        """
        return self._attend_all(self.embed(input_ids), positions, context)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        hidden: Tensor = self.model.embed_tokens(input_ids)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def _attend_all(
        self,
        hidden: Tensor,
        positions: Tensor,
        context: ForwardContext,
        after_layer: Callable[[int, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`up_to_last_attention` of embeddings [num_tokens, hidden_size].

        Args:
            after_layer: changes the output of layer ``index``, [num_tokens, hidden_size]; not of
                the last.
        """
        residual = torch.zeros_like(hidden)
        last: Any = self.model.layers[-1]  # the layers have the methods of DecoderLayer
        layer: Any
        for index, layer in enumerate(self.model.layers):
            hidden, residual = layer.attend(hidden, residual, positions, context)
            if context.auxiliary is not None:
                context.auxiliary.keep(index, residual)
            if layer is not last:
                hidden, residual = layer.feed_forward(hidden, residual)
                if after_layer is not None:
                    hidden = after_layer(index, hidden)
        return hidden, residual

    @torch.inference_mode()
    def after_last_attention(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The rest of :meth:`forward`, row by row: (hidden, residual) [rows, hidden_size] -> [rows,
        hidden_size]"""
        if not len(hidden):  # no prompt ends in this step; a GPU's kernels take no empty batch
            return hidden
        last: Any = self.model.layers[-1]
        hidden, residual = last.feed_forward(hidden, residual)
        return self.model.norm.add_and_norm(hidden, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the whole vocabulary, on every rank.

        Args:
            hidden: [rows, hidden_size], those rows of ``forward``'s result that a token is wanted
                for.

        Returns:
            [rows, vocab_size] float32
        """
        if not len(hidden):
            return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        return self.scaled(self.output_head.logits(hidden))

    @property
    def output_head(self) -> VocabParallelEmbedding:
        """The LM head, which is the embedding where the two are tied."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits of products with rows of the LM head: float32 [rows, n] -> the same. May overwrite
        its input."""
        if self.logit_divisor != 1.0:
            logits = logits / self.logit_divisor
        if self.logit_soft_cap is not None:
            logits = self.kernels.soft_cap(logits, self.logit_soft_cap)
        return logits

    def classify(self, pooled: Tensor) -> Tensor:
        """Scores of the classes: [n, hidden_size] -> [n, classes]"""
        assert self.score is not None, "the checkpoint is no classifier"
        scores: Tensor = self.score(pooled)
        return scores

    def attention_specs(self) -> list[AttentionSpec]:
        """The constants of each layer's attention, on this rank; of layers that have one."""
        return [block.spec for block in self.modules() if isinstance(block, AttentionBlock)]

    def kv_specs(self, dtype: torch.dtype) -> list[KVSpec]:
        """The KV cache of each layer, on this rank; keys and values are kept in ``dtype``."""
        return [
            next(
                (b.kv_spec(dtype) for b in layer.modules() if isinstance(b, AttentionBlock)),
                KVSpec(()),
            )
            for layer in self.model.layers
        ]

    def state_specs(self) -> list[StateSpec]:
        """The state of a sequence in each layer, empty in layers without a recurrent block."""
        return [
            next(
                (b.state_spec() for b in layer.modules() if isinstance(b, RecurrentBlock)),
                StateSpec(),
            )
            for layer in self.model.layers
        ]

    def replace_head(self, num_classes: int) -> None:
        """Drop the LM head, before the weights are loaded. The model gives hidden states, and
        scores of classes if there are any."""
        self.lm_head = None
        self.generates = False
        if num_classes:
            score = nn.Linear(self.config.hidden_size, num_classes, bias=False)
            self.score = score.requires_grad_(False)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the model.

        Raises:
            ConfigError: tensors are missing, unexpected or misshapen; names some of them.
        """
        if (
            not self.generates
        ):  # saved without an LM head, it may name its tensors without the model's prefix
            prefixes = ("model.", "lm_head.", "score.")
            tensors = (
                (name if name.startswith(prefixes) else f"model.{name}", tensor)
                for name, tensor in tensors
            )
        renamed = (pair for name, tensor in tensors for pair in self.translate(name, tensor))
        ignored = {"lm_head.weight"} if self.lm_head is None else set()
        load_into(weight_slots(self), renamed, ignored)


_OTHER_PARTS = (
    "model.visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "vision_embedder.",
    "embed_vision.",
    "embed_audio.",
)


def language_model_only(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Drop the tensors of vision and audio; strip the language model's prefix:
    ``language_model.model.`` or ``model.language_model.``"""
    if any(part in name for part in _OTHER_PARTS):
        return
    name = name.replace("model.language_model.", "model.", 1)
    yield name.removeprefix("language_model."), tensor


class LanguageModelOnly(CausalLM):
    """Before the class of a language model: that of a checkpoint that also sees images, whose
    other parts are left out."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config.text_config, tp, context_length)

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for inner, part in language_model_only(name, tensor):
            yield from super().translate(inner, part)
