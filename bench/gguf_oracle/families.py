"""Compares tiny checkpoints of each family, converted by llama.cpp's tools, with transformers."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import (  # fmt: skip
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from bench.gguf_oracle.checks import Tokens, compare_tokens, logits, served
from bench.gguf_oracle.llama_cpp import LlamaCpp
from bench.peers_cpu.checkpoints import write_dequantized
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model
from tests.checkpoints import make_checkpoint

VOCABULARY = 2048
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.075,
}
"""Rows that K-quants divide, and weights as much smaller as the rows are longer than those of the
tests' checkpoints."""
PROMPT = 48
"""Tokens that logits are compared on."""


class Family(NamedTuple):
    architecture: str
    """Key of ``tests.checkpoints.CONFIGS``."""
    pre: str | None
    """llama.cpp's name of the byte-level pre-tokenizer; None: SentencePiece, but Gemma 4's kind in
    its families."""
    settings: dict[str, Any]
    """What GGUF can say in place of what it cannot."""


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FACTORS = [1 + i / 16 for i in range(24)]
_GEMMA4 = {"head_dim": 64, "global_head_dim": 128}
FAMILIES = {
    "llama 2": Family("llama", None, {"rope_parameters": _ROPE}),
    # the converter reads the original length from elsewhere, so it must be its default
    "llama 3": Family("llama", "llama-bpe", {"rope_parameters": _ROPE | {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    "mistral": Family("mistral", None, {"sliding_window": None, "head_dim": 64}),
    "qwen2": Family("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen3": Family("qwen3", "qwen2", {"head_dim": 64}),
    "gemma2": Family("gemma2", None, {"query_pre_attn_scalar": 64, "head_dim": 64}),
    "gemma3": Family("gemma3", None, {"query_pre_attn_scalar": 64, "head_dim": 64, "num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "gemma4": Family("gemma4", None, _GEMMA4),
    "gemma4 moe": Family("gemma4_moe", None, _GEMMA4 | {"moe_intermediate_size": 256}),
    # llama.cpp takes the last two layers with KV for one of each type
    "gemma4 e": Family("gemma4_e", None, _GEMMA4 | {
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    "phi3": Family("phi3", None, {"rope_parameters": _ROPE | {
        "rope_type": "longrope", "partial_rotary_factor": 0.75, "short_factor": _FACTORS, "long_factor": _FACTORS}}),
    "smollm3": Family("smollm3", "smaug-bpe", {"head_dim": 64, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": Family("olmo2", "dbrx", {"attention_bias": False}),
    "olmo3": Family("olmo3", "dbrx", {}),
    "granite": Family("granite", "refact", {}),
    "seed-oss": Family("seed_oss", "seed-coder", {"head_dim": 64, "attention_out_bias": False}),
    "ernie 4.5": Family("ernie4_5", None, {"head_dim": 64, "use_bias": False}),
    "exaone 4": Family("exaone4", "exaone4", {}),
    # the converter knows the context of the stretched base alone
    "hunyuan": Family("hunyuan", "hunyuan-dense", {"head_dim": 64, "attention_bias": False, "max_position_embeddings": 32768}),
    "ministral 3": Family("ministral3", "tekken", {"head_dim": 64, "rope_parameters": _ROPE | {
        "rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}}),
    "qwen3 moe": Family("qwen3_moe", "qwen2", {"head_dim": 64, "moe_intermediate_size": 256, "mlp_only_layers": []}),
    "glm 4.5": Family("glm4_moe", "glm4", {"head_dim": 64, "moe_intermediate_size": 256}),
    "minimax m2": Family("minimax_m2", "minimax-m2", {"head_dim": 64, "rotary_dim": 32, "scoring_func": "sigmoid"}),
}  # fmt: skip


class Outcome(NamedTuple):
    """One family."""

    name: str
    largest_error: float
    """Largest error of a logit of the float32 file, against transformers on the checkpoint."""
    packed_error: float
    """Largest error of a logit of the Q4_K_M file, dequantized, against transformers on the
    dequantized weights."""
    divergence: float
    """Median over the tokens, in nats, of the Q4_K_M file as it is served, against the same.
    Rounded activations let a router choose other experts for single tokens."""
    greedy: float
    """Share of greedy tokens of the Q4_K_M file that are those of transformers."""
    tokens: Tokens


def compare_families(
    llama: LlamaCpp, folder: Path, texts: Sequence[str], corpus: Path
) -> Iterator[Outcome]:
    """Make each family's files in ``folder``, and compare them.

    Args:
        texts: on which tokenizers are compared.
        corpus: text on which tokenizers are trained.
    """
    for name, family in FAMILIES.items():
        root = folder / name.replace(" ", "")
        checkpoint = make_checkpoint(family.architecture, root / "hf", **SIZES, **family.settings)
        if family.architecture.startswith("gemma4"):
            _train_gemma4(checkpoint, corpus)
        elif family.pre is None:
            _train_sentencepiece(llama, checkpoint, corpus)
        else:
            _train_byte_level(checkpoint, corpus, family.pre)
        plain = llama.convert(checkpoint, root / "f32.gguf", family.pre or "")
        packed = llama.quantize(plain, root / "q4_k_m.gguf", "Q4_K_M")
        prompt = random.Random(1).choices(range(300, VOCABULARY), k=PROMPT)
        found, expected = (
            logits(served(resolve_model_path(str(plain))), prompt),
            reference(checkpoint)(torch.tensor([prompt])).logits[0],
        )
        dequantized = write_dequantized(packed, root / "dequantized", torch.float32)
        base = reference(dequantized)(torch.tensor([prompt])).logits[0]
        dense = load_model(resolve_model_path(str(packed)), dtype="float32")
        rounded = logits(served(resolve_model_path(str(packed))), prompt).float()
        drift = base.softmax(-1) * (base.log_softmax(-1) - rounded.log_softmax(-1))
        with llama.serve(plain) as server:
            normal = [text for text in texts if family.pre != "qwen2" or _is_nfc(text)]
            tokens = compare_tokens(server, resolve_model_path(str(plain)), normal)
        yield Outcome(
            name,
            float((found - expected).abs().max()),
            float((logits(dense, prompt) - base).abs().max()),
            float(drift.sum(-1).median()),
            float((base.argmax(-1) == rounded.argmax(-1)).double().mean()),
            tokens,
        )


def reference(folder: Path) -> torch.nn.Module:
    """A model of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _is_nfc(text: str) -> bool:
    """Qwen's own tokenizer normalizes text to NFC, and so does radixrt; llama.cpp does not."""
    return normalizers.NFC().normalize_str(text) == text


def _train_sentencepiece(llama: LlamaCpp, folder: Path, corpus: Path) -> None:
    """Write tokenizer.model with byte fallback, and control tokens of chats."""
    program = (
        "import sentencepiece as s, sys; s.SentencePieceTrainer.train(input=sys.argv[1], model_prefix=sys.argv[2], "
        f"vocab_size={VOCABULARY}, model_type='bpe', byte_fallback=True, character_coverage=0.9995, "
        "normalization_rule_name='identity', remove_extra_whitespaces=False, split_digits=True, "
        "allow_whitespace_only_pieces=True, control_symbols=['<start_of_turn>'], user_defined_symbols=['[INST]'])"
    )
    llama.run("python", "-c", program, corpus, folder / "tokenizer")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _train_gemma4(folder: Path, corpus: Path) -> None:
    """BPE on characters with byte fallback, whose words begin with their spaces."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "gemma4_unified_text":  # the converter knows the same by this name
        config |= {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    lines = pre_tokenizers.Split(Regex("\n+"), "isolated")  # no token has other characters too
    words = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=200,
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in special]
    content["pre_tokenizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names: dict[str, Any] = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    names["additional_special_tokens"] = special[4:]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _train_byte_level(folder: Path, corpus: Path, pre: str) -> None:
    from radixrt.models.gguf.conversion import byte_level_splitter

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level_splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    of_glm = ["[gMASK]", "<|user|>", "<|observation|>"]  # its converter looks them up
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 32,  # transformers adds tokens of a family that are not there
        special_tokens=special + of_glm,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[2]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
