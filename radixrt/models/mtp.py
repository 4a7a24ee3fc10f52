"""Multi-token prediction (DeepSeek-V3, 2024): a layer that was trained with the model and drafts
tokens, as checkpoints of DeepSeek V3, GLM-4.5, Qwen3-Next and Qwen3.5 have one.

The input at a token is its embedding and the model's state behind the token before it, each normed,
side by side; ``eh_proj`` makes one vector of them. Embedding and LM head are the model's; of a large
vocabulary the head's most frequent tokens are copied, and those alone are drafted
(:mod:`radixrt.models.draft_vocabulary`), with the tokens that the text has already. The state
is what the LM head reads, that behind the final norm, and so is the layer's own where it goes on
behind a draft: both as in transformers (``use_mtp``) and vLLM. A checkpoint may have several such
layers, one for each further token; the first is used for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import ForwardContext
from radixrt.layers.kernels.interface import LayerKernels, use_kernels
from radixrt.layers.linear import RowParallelLinear, allocate_matrices, pack_matrices
from radixrt.layers.matrix import MatrixFormat
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.formats import check_experts, matrix_formats
from radixrt.layers.quantization.fp8_blocks import decoded
from radixrt.layers.quantization.scheme import fp8_block, quantization_scheme
from radixrt.layers.weights import load_into, weight_slots
from radixrt.models.checkpoint import read_config
from radixrt.models.decoder import CausalLM
from radixrt.models.draft_head import DraftHead
from radixrt.models.draft_vocabulary import PIECE, CopiedRows
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.gguf.weights import BlockFormats, name_in_transformers, read_weights
from radixrt.models.head_files import QWEN, drafted_ids, further_prefix
from radixrt.models.loader import default_dtype, read_tensors

_PARTS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "norm",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "norm",
}
"""Parts of the head by their names in checkpoints, without prefix: DeepSeek's and GLM's, those of
GGUF files, and Qwen's."""

_SHARED = ("embed_tokens", "shared_head.head", "nextn.embed_tokens", "nextn.shared_head_head")
"""Copies of the model's embedding and LM head."""


class MtpHead(DraftHead):
    """The layer, behind the projection of embedding and state."""

    drafter = "mtp"

    def __init__(self, model: CausalLM, context_length: int) -> None:
        super().__init__()
        size = self.hidden_size = self.state_size = model.config.hidden_size
        self.enorm = model.norm(size)
        self.hnorm = model.norm(size)
        self.eh_proj = RowParallelLinear(2 * size, size, False, TensorParallel())
        self.layer: Any = model.further_layer(context_length)
        self.norm = model.norm(size)
        self.token_ids = torch.arange(drafted_ids(model.vocab_size))
        self.frequent: CopiedRows | None = None
        """The rows of the LM head that are drafted; None: all of the model's."""
        self._model_embeds, self._model_logits = model.embed, model.logits

    @property
    def attention(self) -> Any:
        return self.layer.self_attn

    def fuse(self, states: Tensor) -> Tensor:
        return states.clone()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        states: Tensor,
        context: ForwardContext,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        embedded = self.enorm.forward(self._model_embeds(token_ids))
        read = torch.cat((embedded, self.hnorm.forward(states)), dim=-1)
        hidden = self.eh_proj.forward(read)
        residual = torch.zeros_like(hidden)
        hidden, residual = self.layer.attend(hidden, residual, positions, context)
        if wanted is not None:
            hidden, residual = hidden[wanted], residual[wanted]
        if not len(hidden):
            return hidden, hidden
        hidden, residual = self.layer.feed_forward(hidden, residual)
        hidden, _ = self.norm.add_and_norm(hidden, residual)
        return hidden, hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        rows = self.frequent
        return self._model_logits(hidden) if rows is None else rows.logits(hidden)


def load_mtp_head(
    folder: Path,
    model: CausalLM,
    context_length: int,
    kernels: LayerKernels,
    quantization: str = "auto",
) -> MtpHead:
    """Load the layer of a checkpoint that has one, ready to run, in the dtype of its model.

    Args:
        quantization: as of the model, see ``load_model``.

    Raises:
        ConfigError: its tensors are not those of a layer of the model.
    """
    config, prefix = read_config(folder), further_prefix(folder)
    assert prefix is not None, "the checkpoint has such a layer"
    entries = gguf_tensors(folder)
    kept: set[str] = set()
    translate = partial(_translate, prefix, model)
    scheme = quantization_scheme(config, quantization)
    with default_dtype(model.dtype):
        head = MtpHead(model, context_length).eval()
        formats = _in_checkpoint(prefix, matrix_formats(scheme, tied_head=False))
        if scheme is not None:
            check_experts(head, scheme, kernels)
        if entries is not None:
            entries = [
                one for one in entries if name_in_transformers(one.name, config).startswith(prefix)
            ]
            if quantization == "auto" and kernels.multiplies_blocks:
                blocks = BlockFormats(entries, config, translate)
                formats, kept = blocks.format_of, blocks.kept
        allocate_matrices(head, formats)
    if entries is None:
        tensors = read_tensors(folder, wanted=lambda name: name.startswith(prefix))
        if (block := fp8_block(config)) is not None:
            tensors = decoded(tensors, block)
    else:
        tensors = read_weights(entries, config, model.dtype, kept)
    renamed = (part for name, tensor in tensors for part in translate(name, tensor))
    load_into(weight_slots(head), renamed, set())
    use_kernels(head, kernels)
    pack_matrices(head, kernels)
    if len(head.token_ids) < model.vocab_size:
        head.frequent = CopiedRows(model, len(head.token_ids), kernels)
        head.frequent.copy(head.token_ids, head.token_ids)
        head.more_rows = CopiedRows(model, PIECE, kernels).another
    return head


def _translate(
    prefix: str, model: CausalLM, name: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the checkpoint under the names of :class:`MtpHead`; those in the layer are
    translated as the last layer's."""
    rest = name.removeprefix(prefix)
    part, _, kind = rest.rpartition(".")
    if part in _SHARED:
        return
    if part in _PARTS:
        yield f"{_PARTS[part]}.{kind}", tensor
        return
    if prefix == QWEN:
        _, number, rest = rest.split(".", 2)
        if number != "0":
            return
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    for inner, piece in model.translate(last + rest, tensor):
        yield f"layer.{inner.removeprefix(last)}", piece


def _in_checkpoint(
    prefix: str, formats: Callable[[str, Sequence[str]], MatrixFormat]
) -> Callable[[str, Sequence[str]], MatrixFormat]:
    """The formats of the head's matrices, which the checkpoint's scheme knows by its own names."""
    layer, projection = (f"{prefix}layers.0.", "fc") if prefix == QWEN else (prefix, "eh_proj")

    def own(path: str) -> str:
        if path == "eh_proj":
            return prefix + projection
        return layer + path.removeprefix("layer.")

    return lambda path, names: formats(own(path), [own(name) for name in names])
