"""Checks a GGUF file, and writes what its header holds as the files of a checkpoint folder: config,
tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing

from radixrt.base.errors import ConfigError
from radixrt.models.gguf.config import generation_config, pooling_files, transformers_config
from radixrt.models.gguf.file import GGUFFile, read_header
from radixrt.models.gguf.form import PLAIN_KINDS, PROCESSOR_FILE, TABLE, import_gguf
from radixrt.models.gguf.tower import Tower

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}{_LETTERS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}{_LETTERS}|\p{{N}}{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace(_CONTRACTIONS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"]+[\r\n]*", r"\r\n]+")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL_SPLITS: dict[str, tuple[str | None, ...]] = {
    "default": (None,),
    "gpt-2": (None,),
    "exaone4": (None,),
    "refact": (r"\p{N}", None),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "lfm2": (_LLAMA3,),
    "falcon-h1": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "deepseek-r1-qwen": (_QWEN2,),
    "seed-coder": (_SEED,),
    "hunyuan-dense": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    "tekken": (_TEKKEN,),
    "minimax-m2": (_O200K,),
    "gpt-4o": (_O200K,),
}
"""Regular expressions that cut a text, one after the other, before byte-level BPE, by llama.cpp's
name; None: GPT-2's."""
_WITHOUT_MERGES = {"llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "glm4", "tekken"}
"""A piece that is a token is not merged."""
_BEGINS = {"llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "tekken"}
"""A text begins with the beginning-of-sequence token, if the file does not say otherwise."""


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Raises:
        ConfigError: a kind of tokenizer that is not supported.
    """
    meta = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = meta.get("model")
    if kind not in ("gpt2", "llama", "gemma4") or not meta.get("tokens"):
        raise ConfigError(
            f"{file.files[0]} has a tokenizer of the kind {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece) and 'gemma4'."
        )
    tokenizer = _byte_level(meta) if kind == "gpt2" else _sentencepiece(meta)
    _add_tokens(tokenizer, meta)
    _add_ends(tokenizer, meta, is_embedder=bool(pooling_files(file)))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {
        f"{ours}_token": meta["tokens"][meta[f"{theirs}_token_id"]]
        for theirs, ours in names.items()
        if f"{theirs}_token_id" in meta
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(meta: dict[str, Any]) -> Tokenizer:
    """GPT-2's kind: the file has the merges."""
    name = meta.get("pre", "default")
    if name not in BYTE_LEVEL_SPLITS:
        raise ConfigError(
            f"The tokenizer's pre-tokenizer {name!r} is not supported in GGUF files; supported: {', '.join(BYTE_LEVEL_SPLITS)}."
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(meta["tokens"])},
            merges=[tuple(merge.split(" ", 1)) for merge in meta.get("merges", ())],
            ignore_merges=name in _WITHOUT_MERGES,
        )
    )
    tokenizer.pre_tokenizer = byte_level_splitter(name)
    if not {_QWEN2, _QWEN35}.isdisjoint(BYTE_LEVEL_SPLITS[name]):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_splitter(name: str) -> pre_tokenizers.PreTokenizer:
    """Cuts a text as a pre-tokenizer of ``BYTE_LEVEL_SPLITS`` does, into pieces of bytes."""
    *others, last = BYTE_LEVEL_SPLITS[name]
    parts = [pre_tokenizers.Split(Regex(each), "isolated") for each in (*others, last) if each]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last is None)
    return pre_tokenizers.Sequence([*parts, bytes_only]) if parts else bytes_only


def _sentencepiece(meta: dict[str, Any]) -> Tokenizer:
    """Llama 2's and Gemma's kind. In the files of Gemma 4 are the merges."""
    kinds = meta.get("token_type") or [_NORMAL] * len(meta["tokens"])
    vocab = {token: i for i, token in enumerate(meta["tokens"])}
    pieces = {t for t, kind in zip(meta["tokens"], kinds, strict=True) if kind == _NORMAL}
    if "merges" in meta:
        merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    else:
        merges = _merges_by_scores(vocab, pieces, meta.get("scores"))
    unknown = next((t for t, k in zip(meta["tokens"], kinds, strict=True) if k == _UNKNOWN), None)
    if "unknown_token_id" in meta:
        unknown = meta["tokens"][meta["unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            byte_fallback=True,
            unk_token=unknown,
            fuse_unk=True,
        )
    )
    prefix = meta.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_scores(
    vocab: dict[str, int], pieces: set[str], scores: list[float] | None
) -> list[tuple[str, str]]:
    """The merges into each of the pieces, in the order of the scores of the tokens that they
    make."""
    scores = scores or [0.0] * len(vocab)
    merges = [
        (-scores[vocab[token]], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token in pieces
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_tokens(tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
    """Control tokens and user-defined ones are found in a text before it is cut."""
    kinds = meta.get("token_type") or ()
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(meta["tokens"], kinds, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _add_ends(tokenizer: Tokenizer, meta: dict[str, Any], is_embedder: bool) -> None:
    """Let a text begin with the beginning-of-sequence token if the file says so, and in an
    embedding model end with the end-of-sequence token. A text to be continued has no end."""
    default = meta["model"] != "gpt2" or meta.get("pre") in _BEGINS
    wanted = {
        "bos": meta.get("add_bos_token", default),
        "eos": is_embedder and meta.get("add_eos_token", False),
    }
    ids = {
        end: meta[f"{end}_token_id"] for end in wanted if wanted[end] and f"{end}_token_id" in meta
    }
    if not ids:
        return
    names = {end: meta["tokens"][token_id] for end, token_id in ids.items()}
    first, last = ([names[end]] if end in names else [] for end in ("bos", "eos"))
    tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[(names[end], token_id) for end, token_id in ids.items()],
    )


def check_file(path: Path) -> tuple[GGUFFile, dict[str, Any]]:
    """The header of a GGUF file and the content of config.json.

    Raises:
        ConfigError: the package ``gguf`` is missing, the file cannot be read or cannot be served.
            The tokenizer is not looked at.
    """
    import_gguf(path)
    file = read_header(path)
    _check_kinds(file)

    def factors(name: str) -> list[float]:
        entry = file.tensors[name]
        values = np.fromfile(entry.file, np.float32, entry.shape[-1], offset=entry.offset)
        return [float(str(value)) for value in values]

    return file, transformers_config(file, factors)


def write_folder(
    file: GGUFFile, config: dict[str, Any], folder: Path, tower: Tower | str = ""
) -> None:
    """Write all files of a checkpoint folder but the weights.

    Args:
        tower: of the model; a string: it has none, for this reason.
    """
    write_tokenizer(file, folder)
    files, tensors = file.files, [*file.tensors.values()]
    processor: dict[str, Any] = {}
    if isinstance(tower, Tower):
        _check_kinds(tower.file)
        config, processor = tower.config, {PROCESSOR_FILE: tower.processor}
        files, tensors = [*files, *tower.file.files], [*tensors, *tower.file.tensors.values()]
    contents = {
        "config.json": config,
        "generation_config.json": generation_config(file),
        **pooling_files(file),
        **processor,
        TABLE: {
            "files": {str(path): path.stat().st_size for path in files},
            "tensors": tensors,
            "why_no_tower": "" if processor else tower,
        },
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def _check_kinds(file: GGUFFile) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kinds = {GGMLQuantizationType(entry.kind) for entry in file.tensors.values()}
    for kind in sorted(kinds):
        if kind in PLAIN_KINDS:
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(
                f"{file.files[0]} has weights of the kind {kind.name}, which the package gguf cannot dequantize."
            ) from None
