"""Writes a checkpoint folder to measure with: ``python -m bench.dummy_checkpoint DIR``.

The folder has no weights, or random ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.byte_tokenizer import END, byte_tokenizer
from radixrt.bench.arguments import positive


def write_dummy_checkpoint(
    folder: Path,
    *,
    hidden_size: int = 896,
    num_layers: int = 24,
    num_heads: int | None = None,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    intermediate_size: int | None = None,
    vocab_size: int = 32000,
    context_length: int = 8192,
    dtype: str = "bfloat16",
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write config and tokenizer of a Llama-shaped model; serve it with ``--load-format dummy``.

    The defaults are the shape of a 387 M model with a vocabulary of 32k. Unless one is given, the
    tokenizer knows bytes only; its last token ends an answer.
    """
    tokenizer = tokenizer or byte_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or round(hidden_size * 5.43),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads or hidden_size // head_dim,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    return write_folder(folder, config, tokenizer)


def write_folder(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> Path:
    """Write a checkpoint's config, a tokenizer whose end token is END, and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: ",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_random_weights(folder: Path, seed: int = 0) -> Path:
    """Write seeded random weights in bfloat16 for the Llama in ``folder``, unless they are there:
    other engines make up none.

    Matrices keep activations near unit scale; norms are 1.
    """
    import torch
    from safetensors.torch import save_file

    weights = folder / "model.safetensors"
    if weights.is_file():
        return folder
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()
        for name, shape in _shapes(json.loads((folder / "config.json").read_text()))
    }
    unfinished = weights.with_suffix(".part")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(weights)
    return folder


def write_random_hybrid(folder: Path, tokenizer: Tokenizer, seed: int = 0) -> Path:
    """Write a Qwen3.5 of the shape of its 0.8B model with seeded random weights in bfloat16: three
    layers with a gated delta net for each with attention.

    Its states forget slowly, as those of a trained model. Its embeddings are small, or it would
    repeat its last token.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=tokenizer.get_vocab_size(),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(END),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.2)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(0.001, 0.05).log())
    model.save_pretrained(folder)
    shape = json.loads((folder / "config.json").read_text())
    return write_folder(folder, shape, tokenizer)


def write_random_latents(folder: Path, tokenizer: Tokenizer, seed: int = 0, **shape: int) -> Path:
    """Write a DeepSeek-V2-Lite with seeded random weights in bfloat16: its shape, but 16 experts
    instead of 64, of which a token still goes to 6, and 9 layers instead of 27: 1.6 billion weights.

    Args:
        shape: fields of the config that have other values.
    """
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    fields: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "max_position_embeddings": 8192,
        "vocab_size": tokenizer.get_vocab_size(),
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(END),
        **shape,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(DeepseekV2Config(**fields), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return write_folder(folder, json.loads((folder / "config.json").read_text()), tokenizer)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Llama whose LM head is its embedding."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[f"num_{heads}"] * config["head_dim"]
        for heads in ("attention_heads", "key_value_heads")
    )
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.mlp.gate_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, mlp)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def add_shape(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Declare those of ``--hidden-size``, ``--num-layers`` and ``--vocab-size`` with a default."""
    for flag in ("--hidden-size", "--num-layers", "--vocab-size"):
        default = defaults.get(flag.removeprefix("--").replace("-", "_"))
        if default is not None:
            parser.add_argument(flag, type=positive, default=default, metavar="N", help="of the untrained model (default: %(default)s)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint and print the command that serves it; returns the exit status."""
    arguments = _parse(argv)
    folder = write_dummy_checkpoint(
        Path(arguments.folder),
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        vocab_size=arguments.vocab_size,
        dtype=arguments.dtype,
    )
    print(f"Serve it with: radixrt serve --model-path {folder} --load-format dummy")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.dummy_checkpoint", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", metavar="DIR", help="where to write it")
    add_shape(parser, hidden_size=896, num_layers=24, vocab_size=32000)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
