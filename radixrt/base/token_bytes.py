"""Reads a tokenizer, and the bytes of each of its tokens."""

import contextlib
import ctypes
import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer


def load_tokenizer(tokenizer_json: Path) -> Tokenizer:
    """Read a tokenizer.json. Parsing leaves free memory behind, 65 MB for 262,144 tokens, which is
    returned to the system.

    Raises:
        Exception: the file cannot be read, or is no tokenizer; the library raises no other type.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    give_memory_back()
    return tokenizer


def give_memory_back() -> None:
    """Return the free memory of this process to the system, in some milliseconds, where the C
    library is able to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class TokenBytes:
    """The bytes of each token of a ``tokenizers`` tokenizer.

    Attributes:
        special_ids: control tokens, which are not part of texts.
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

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for an id without a token."""
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTE_LEVEL.get(c) or c.encode() for c in token)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


class TokenBytesTable:
    """The bytes of many tokens, by id from 0 on, in a fifth of the memory of a list.

    Attributes:
        ends: uint32 for each token, where its bytes end.
        data: the bytes of all tokens.
    """

    def __init__(self, ends: bytes, data: bytes) -> None:
        self.ends = array("I", ends)
        self.data = data

    @staticmethod
    def from_tokens(tokens: Iterable[bytes]) -> "TokenBytesTable":
        tokens = list(tokens)
        return TokenBytesTable(array("I", accumulate(map(len, tokens))).tobytes(), b"".join(tokens))

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token; None for an id beyond the table."""
        if not 0 <= token_id < len(self.ends):
            return None
        return self.data[self.ends[token_id - 1] if token_id else 0 : self.ends[token_id]]

    def resized(self, length: int) -> "TokenBytesTable":
        """The first ``length`` tokens; missing ones have no bytes."""
        ends = self.ends[:length]
        ends.extend([ends[-1] if ends else 0] * (length - len(ends)))
        return TokenBytesTable(ends.tobytes(), self.data)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, token_id: int) -> bytes:
        if (found := self.bytes_of(token_id)) is None:
            raise IndexError(token_id)
        return found

    def __iter__(self) -> Iterator[bytes]:
        data = self.data
        return (data[start:end] for start, end in pairwise((0, *self.ends)))


class SavedTokens(msgspec.Struct, frozen=True):
    """The tokens of a tokenizer, as a file beside its tokenizer.json, which is read in a twentieth
    of the time."""

    special_ids: tuple[int, ...]
    ends: bytes
    """The ends of :class:`TokenBytesTable`."""
    data: bytes

    @staticmethod
    def file_of(tokenizer_json: Path) -> Path:
        return tokenizer_json.with_name("token_bytes.msgpack")

    def save(self, tokenizer_json: Path) -> None:
        """Other processes may read the file meanwhile."""
        file = self.file_of(tokenizer_json)
        written = file.with_suffix(".new")
        written.write_bytes(msgspec.msgpack.encode(self))
        written.replace(file)

    @staticmethod
    def load(tokenizer_json: Path) -> "SavedTokens | None":
        """None: there is no such file, or it is damaged."""
        try:
            content = SavedTokens.file_of(tokenizer_json).read_bytes()
            return msgspec.msgpack.decode(content, type=SavedTokens)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    @property
    def table(self) -> TokenBytesTable:
        return TokenBytesTable(self.ends, self.data)


def _component_types(component: Any) -> set[str]:
    """Names of a decoder and of all decoders inside it."""
    if component is None:
        return set()
    return set(re.findall(r'"type":\s*"(\w+)"', component.__getstate__().decode()))


def _byte_level_alphabet() -> dict[str, bytes]:
    """The byte of each character in byte-level BPE (GPT-2): printable Latin-1 characters stand for
    themselves, and the characters 256, 257, ... for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in the tokens of a byte-level vocabulary (GPT-2)."""
    return {encoded[0]: character for character, encoded in _BYTE_LEVEL.items()}


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A single byte, as sentencepiece writes it."""
