"""Tiny random checkpoints of every architecture, saved by transformers: what tests serve and
compare with."""

import itertools
import json
from pathlib import Path
from typing import Any

from tests.checkpoints.hybrid_configs import HYBRID_CONFIGS

VOCAB_SIZE = 384
MAX_POSITIONS = 512
END_OF_TURN = 2
"""Id of ``<|im_end|>`` in the tokenizer of ``make_tokenizer``: the checkpoints' end-of-sequence
token."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
}
_EXPERTS = {"num_experts_per_tok": 2}

_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN_OF_LATENTS = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}

_GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 24,
    "global_head_dim": 40,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 0.5,
    "tie_word_embeddings": True,
}
_TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_biased_tied": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9, "head_dim": 32}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2_yarn": (
        "Qwen2Config",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_EXPERTS,
            "head_dim": 32,
            "num_experts": 6,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_unnormed": (
        "Qwen3MoeConfig",
        {
            **_EXPERTS,
            "num_experts": 6,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4, "sliding_window": 11}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "gemma3_vision": ("Gemma3Config", _GEMMA3),
    "gemma4": (
        "Gemma4UnifiedTextConfig",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_moe": (
        "Gemma4Config",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_e": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": MAX_POSITIONS,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3_long": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 16,
            "sliding_window": 40,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("Olmo2Config", {"attention_bias": True}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_EXPERTS,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": YARN_OF_LATENTS,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "rope_parameters": YARN_OF_LATENTS}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENT, "n_group": 1, "topk_group": 1}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**_EXPERTS, "num_local_experts": 6, "head_dim": 32, "rotary_dim": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_EXPERTS,
            "head_dim": 24,
            "num_local_experts": 6,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24, "use_bias": True}),
    "exaone4": (
        "Exaone4Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 20.0,
            },
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    **HYBRID_CONFIGS,
}
"""Name to the config class in transformers and what it has beside the common settings."""

HYBRIDS = list(HYBRID_CONFIGS)
"""Those with recurrent layers."""


_ENCODER: dict[str, Any] = {"attention_dropout": 0.0, "pad_token_id": 1, "type_vocab_size": 1}

POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {"type_vocab_size": 2, "max_position_embeddings": 128}),
    "xlm_roberta": ("XLMRobertaConfig", {**_ENCODER, "max_position_embeddings": 130}),
    "modernbert": (
        "ModernBertConfig",
        {"local_attention": 16, "global_attn_every_n_layers": 2, "hidden_activation": "gelu"},
    ),
    "embeddinggemma": (
        "Gemma3TextConfig",
        {**_GEMMA3, "use_bidirectional_attention": True, "sliding_window": 20},
    ),
    "qwen3": CONFIGS["qwen3"],
}
"""As ``CONFIGS``, of models that give vectors or classes."""


def _config(architecture: str, overrides: dict[str, Any]) -> Any:
    import transformers

    class_name, specific = CONFIGS[architecture]
    settings = {**_COMMON, **specific, **overrides}
    if class_name == "Gemma3Config":
        return transformers.Gemma3Config(
            text_config=settings, vision_config=_TINY_VISION, mm_tokens_per_image=4
        )
    if class_name == "Gemma4Config":
        vision = {**_TINY_VISION, "num_key_value_heads": 2, "head_dim": 8}
        return transformers.Gemma4Config(text_config=settings, vision_config=vision)
    if class_name == "Qwen3_5Config":
        vision = {**_TINY_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
        return transformers.Qwen3_5Config(text_config=settings, vision_config=vision)
    return getattr(transformers, class_name)(**settings)


def make_checkpoint(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Save a seeded random checkpoint in ``folder`` and return it.

    Args:
        architecture: a key of ``CONFIGS``.
        overrides: further fields of the config.
    """
    import torch
    import transformers

    config = _config(architecture, overrides)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # norms and biases: random as well, or a forgotten one goes unseen
            if weight.ndim == 1 or name.endswith("_bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
            if name.endswith("gate_up_proj_bias"):  # some are beyond the bounds of the activation
                weight[:, [0, 3, 5]] += torch.tensor([7.0, 7.0, -7.0])
            if name.endswith("A_log"):  # the usual values forget a wrong state in a few tokens
                weight.copy_(torch.empty_like(weight).uniform_(0.001, 0.05).log())
            if name.endswith("dt_bias"):
                weight.copy_(torch.empty_like(weight).uniform_(-1.0, 1.0))
        if architecture.startswith("gemma4"):  # its scores have no factor
            for name, weight in model.named_parameters():
                if name.endswith("q_norm.weight"):
                    weight.mul_(0.2)
        for name, tensor in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
        if config.get_text_config().tie_word_embeddings:  # or the model repeats its last token
            model.get_input_embeddings().weight.mul_(0.2)
    model.save_pretrained(folder)
    return folder


def make_pooled(
    architecture: str,
    folder: Path,
    *,
    pooling: str = "mean",
    normalize: bool = True,
    dense: tuple[int, ...] = (),
    **overrides: Any,
) -> Path:
    """Save a seeded random embedding model in ``folder``, with the files of sentence-transformers,
    and return it.

    Args:
        architecture: a key of ``POOLED``.
        pooling: mean, cls or lasttoken.
        dense: sizes of linear layers behind the pooling.
        overrides: further fields of the config. With ``num_labels`` it is a classifier, without
            those files.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    class_name, specific = POOLED[architecture]
    config = getattr(transformers, class_name)(**{**_COMMON, **specific, **overrides})
    torch.manual_seed(2)
    kind = "ForSequenceClassification" if "num_labels" in overrides else ""
    model = getattr(transformers, f"AutoModel{kind}").from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    if kind:
        return folder
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [(f"{2 + i}_Dense", "Dense") for i in range(len(dense))]
    modules += [("9_Normalize", "Normalize")] * normalize
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({f"pooling_mode_{pooling}{'_tokens' * (pooling == 'mean')}": True})
    )
    sizes = [config.hidden_size, *dense]
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        part = folder / f"{2 + i}_Dense"
        part.mkdir()
        (part / "config.json").write_text(
            json.dumps({"activation_function": "torch.nn.modules.linear.Identity"})
        )
        save_file(
            {"linear.weight": torch.randn(outputs, inputs) * inputs**-0.5},
            part / "model.safetensors",
        )
    return folder


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TRAINING_TEXT = [
    "The user asks a question and the assistant answers it in a few words.",
    "A radix tree keeps the prefixes that requests share, so none is computed twice.",
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "One document, many questions: the first pays for the document, the others read the cache.",
]


def make_tokenizer(folder: Path) -> Path:
    """Save a byte-level BPE tokenizer with ChatML special tokens and template in ``folder`` and
    return it.

    It has at most ``VOCAB_SIZE`` tokens; the special ones have ids 0, 1 and 2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def make_served(folder: Path, **overrides: Any) -> Path:
    """Save a tiny Llama with a tokenizer in ``folder``, and return it."""
    return make_tokenizer(make_checkpoint("llama", folder, **overrides))
