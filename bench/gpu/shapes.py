"""Models by their shape: what a step reads and computes, and checkpoints without weights.

Speed depends on a model's shape and not on its numbers, so measurements run on random weights
(``--load-format dummy``), drawn on the device, and need neither network nor disk.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.byte_tokenizer import synthetic_tokenizer
from bench.dummy_checkpoint import write_folder

_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama kind. Weights, activations and KV cache have the same dtype."""

    name: str
    model_type: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    rope: dict[str, Any]
    dtype: str = "bfloat16"
    element_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices: what every token is multiplied by."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = self.hidden_size * (heads + self.num_heads * self.head_dim)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head, by which every sampled row is multiplied."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def attention_flops(self) -> int:
        """FLOPs of one query and one token of its context: scores and weighted sum, all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """config.json, as transformers writes it."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "rope_parameters": self.rope,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": self.dtype,
            "eos_token_id": self.vocab_size - 1,
        }

    def write_checkpoint(self, folder: Path) -> Path:
        """config.json and a tokenizer in ``folder``, for ``--load-format dummy``."""
        return write_folder(folder, self.config(), synthetic_tokenizer(self.vocab_size))

    def tiny(self) -> "ModelShape":
        """The same architecture in a size that a CPU computes at once."""
        return replace(
            self,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=1024,
            dtype="float32",
            element_bytes=4,
        )


LLAMA_31_8B = ModelShape(
    name="Llama-3.1-8B",
    model_type="llama",
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied=False,
    rope=_LLAMA_31_ROPE,
)
QWEN3_06B = ModelShape(
    name="Qwen3-0.6B",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    tied=True,
    rope={"rope_type": "default", "rope_theta": 1000000.0},
)
QWEN3_14B = replace(
    QWEN3_06B,
    name="Qwen3-14B",
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=40,
    num_heads=40,
    tied=False,
)
