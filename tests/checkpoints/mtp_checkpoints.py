"""Checkpoints with a layer of random weights that predicts further tokens, and that layer in
transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from radixrt.models.checkpoint import read_config, text_config
from tests.checkpoints import make_checkpoint

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mtp_num_hidden_layers": 1,
}
MTP_FAMILIES: dict[str, dict[str, Any]] = {"deepseek_v3": {}, "glm4_moe": {}, "qwen3_5": _HYBRID}
MORE_MTP_FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {},
    "qwen3_next": _HYBRID,
    "qwen3_5_moe": _HYBRID,
}
"""Families whose parts are those of others."""


def make_with_mtp(family: str, folder: Path, **overrides: Any) -> Path:
    """A checkpoint of a family with such a layer, under the names that its authors use."""
    own = {**MTP_FAMILIES, **MORE_MTP_FAMILIES}[family]
    make_checkpoint(family, folder, **{**own, **overrides})
    return add_mtp(folder)


def add_mtp(folder: Path) -> Path:
    """Add such a layer to a checkpoint; its shapes are those of the last layer with attention."""
    config = text_config(read_config(folder))
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    output = "self_attn.o_proj.weight"
    last = max(name for name in tensors if name.endswith(output)).removesuffix(output)
    model = last.partition("layers.")[0]
    is_qwen = config["model_type"].startswith("qwen")
    generator = torch.Generator().manual_seed(7)

    def random(like: Tensor) -> Tensor:
        values = torch.randn(like.shape, generator=generator).to(like.dtype)
        if like.ndim == 1:
            return values * 0.2 + (0.0 if is_qwen else 1.0)
        return values * like.float().std()

    layer = "mtp.layers.0." if is_qwen else f"model.layers.{layers}."
    further = {
        name.replace(last, layer): random(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    norm, top = tensors[f"{model}norm.weight"], "mtp." if is_qwen else layer
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    projection = "fc"
    if not is_qwen:
        norms, projection = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
        for copy in ("embed_tokens", "shared_head.head"):
            further[f"{layer}{copy}.weight"] = tensors[f"{model}embed_tokens.weight"].clone()
    for name in norms:
        further[f"{top}{name}.weight"] = random(norm)
    wide = torch.randn((hidden, 2 * hidden), generator=generator) * (2 * hidden) ** -0.5
    further[f"{top}{projection}.weight"] = wide.to(norm.dtype)
    save_file(tensors | further, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TransformersMtp:
    """The model and its layer, without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self._model.config
        if config.model_type.startswith("qwen"):  # which ignores its layer
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        else:  # which knows the number of layers of the published checkpoint
            further = config.num_hidden_layers
            self._model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{further}\..*"]
        self._layer = MtpModel.from_pretrained(self._model)

    @torch.inference_mode()
    def chain(
        self, text: list[int], length: int, drafted: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The logits [vocab_size] of ``length`` draft tokens behind a text.

        Args:
            drafted: these tokens; None: each time the likeliest.
        """
        states = self._model.model(torch.tensor([text[:-1]])).last_hidden_state
        tokens, chain = text[1:], []
        for place in range(length):
            positions = torch.arange(1, len(tokens) + 1)[None]
            hidden = self._layer.forward_layer(
                0, states, positions, None, input_ids=torch.tensor([tokens])
            )
            chain.append(self._layer._project_to_logits(hidden[0, -1]))
            tokens = [*tokens, int(chain[-1].argmax()) if drafted is None else drafted[place]]
            states = torch.cat((states, hidden[:, -1:]), dim=1)
        return chain
