"""Which bytes does a token stand for? The one place that knows the kinds of tokenizers."""

import json
from typing import Any

from tokenizers import Tokenizer


class TokenBytes:
    """The bytes behind each token of a ``tokenizers`` tokenizer.

    Attributes:
        special_ids: control tokens, which no text is made of.
        added: the text of each added token, control tokens included, by id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._tokenizer = tokenizer
        steps = _component_types(tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in steps
        self._has_byte_tokens = "ByteFallback" in steps

    def of(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for an id that has no token."""
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTE_LEVEL.get(c) or c.encode() for c in token)
        if self._has_byte_tokens and _is_byte_token(token):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _is_byte_token(token: str) -> bool:
    """``<0x0A>``, as sentencepiece writes a single byte."""
    return (
        len(token) == 6
        and token.startswith("<0x")
        and token.endswith(">")
        and all(digit in "0123456789ABCDEFabcdef" for digit in token[3:5])
    )


def _component_types(component: Any) -> set[str]:
    """Names of a decoder and of all decoders inside it."""
    if component is None:
        return set()
    found: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            found.add(str(node.get("type")))
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                collect(child)

    collect(json.loads(component.__getstate__()))
    return found


def _byte_level_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level BPE (GPT-2): printable Latin-1 characters
    stand for themselves, the other bytes for 256, 257, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()
