"""Makes a tokenizer of ``tiktoken.model``, the form of Kimi K2's and Moonlight's, whose own
tokenizer is code in the checkpoint, which is not run."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from radixrt.base.errors import ConfigError
from radixrt.base.token_bytes import byte_characters

FILE = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
"""The class in the checkpoints' code that splits text by ``_SPLITS``."""
_NO_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SPLITS = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NO_HAN}]*[\p{{Ll}}{_NO_HAN}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NO_HAN}]+[\p{{Ll}}{_NO_HAN}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
_NUM_SPECIAL = 256
"""Ids of special tokens behind those of the file, named or not."""
_LONGEST = 1024
"""Bytes of a token; the time grows with the square of them."""


def read_tiktoken(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The tokenizer of a checkpoint as a transformers one.

    Args:
        settings: the content of tokenizer_config.json.

    Raises:
        ConfigError: its text is split in a way that only its code knows, or the file is damaged.
    """
    import transformers

    if settings.get("tokenizer_class") != _CLASS:
        raise ConfigError(
            f"The tokenizer in {folder} is {FILE} and code of the checkpoint ({settings.get('tokenizer_class')}), which is not "
            "run; name a folder with a tokenizer.json of the model with --tokenizer-path."
        )
    backend = _tokenizer(_ranks(folder / FILE), settings)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: _text(settings[name]) for name in names if settings.get(name)}
    template = folder / "chat_template.jinja"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.read_text("utf-8")
        if template.is_file()
        else settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _ranks(file: Path) -> dict[bytes, int]:
    """The tokens of a file, whose lines have one in base 64 and its id; lower ids merge first."""
    ranks = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"{file} is damaged ({error}). Download it again.") from error
    lacks_bytes = any(bytes([byte]) not in ranks for byte in range(256))
    if lacks_bytes or set(ranks.values()) != set(range(len(ranks))):
        raise ConfigError(f"{file} is damaged: it lacks tokens. Download it again.")
    if longest := next((token for token in ranks if len(token) > _LONGEST), None):
        raise ConfigError(
            f"{file} has a token of {len(longest)} bytes; at most {_LONGEST} are possible."
        )
    return ranks


def _tokenizer(ranks: dict[bytes, int], settings: Mapping[str, Any]) -> Tokenizer:
    characters = byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = [(written(left), written(right)) for left, right in _merges(ranks)]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLITS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    named = settings.get("added_tokens_decoder") or {}
    for id_ in range(len(ranks), len(ranks) + _NUM_SPECIAL):
        found = named.get(str(id_)) or {"content": f"<|reserved_token_{id_}|>", "special": True}
        special = bool(found.get("special", True))
        tokenizer.add_tokens([AddedToken(found["content"], special=special, normalized=False)])
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that merge, in the order in which they do: any two tokens whose bytes are a third,
    by its rank."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _text(token: Any) -> str:
    """A token of tokenizer_config.json, which may be an object."""
    return str(token["content"] if isinstance(token, dict) else token)
