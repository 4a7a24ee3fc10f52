"""gpt-oss: attention sinks, a sliding window in every second layer, experts with biases and a
clamped activation."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.hf_config import sliding_window
from radixrt.layers.kernels.interface import SWIGLU_ALPHA, SWIGLU_LIMIT
from radixrt.layers.moe import Experts, Router, SparseMoE
from radixrt.models.decoder import CausalLM

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(\w+_proj)(?:[._](weight|bias|blocks|scales))?")


class GptOssForCausalLM(CausalLM):
    """The experts are plain, or in MXFP4."""

    def attention_options(self, index: int) -> dict[str, Any]:
        bias = self.config.attention_bias
        window = sliding_window(self.config, index)
        return {
            "qkv_bias": bias,
            "output_bias": bias,
            "sliding_window": window,
            "has_sinks": True,
        }

    def mlp(self, index: int) -> SparseMoE:
        config = self.config
        if (config.swiglu_alpha, config.swiglu_limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
            raise ConfigError(
                f"The checkpoint's config.json has swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit}; "
                f"{SWIGLU_ALPHA} and {SWIGLU_LIMIT} are supported."
            )
        hidden, size, count = config.hidden_size, config.intermediate_size, config.num_local_experts
        router = Router(hidden, count, config.num_experts_per_tok, normalize=True, bias=True)
        return SparseMoE(router, Experts(count, hidden, size, "clamped_swiglu", self.tp, bias=True))

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint has all experts in one tensor, plain ones with input features first. Rows
        of gate and up alternate."""
        name = name.replace(".mlp.router.", ".mlp.gate.")
        if (found := _EXPERTS.fullmatch(name)) is None:
            yield name, tensor
            return
        path, projection, kind = found.groups()
        if kind is None:
            tensor = tensor.transpose(1, 2)
        names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        for expert, part in enumerate(tensor):
            for first, each in enumerate(names):
                yield f"{path}.{expert}.{each}.{kind or 'weight'}", part[first :: len(names)]
