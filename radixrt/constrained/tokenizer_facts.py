"""The properties of a tokenizer that grammars need: the bytes of each token id, the ids without
text, and the end tokens."""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from radixrt.base.errors import ConfigError
from radixrt.base.token_bytes import SavedTokens, TokenBytes, TokenBytesTable, load_tokenizer
from radixrt.constrained.bitmask import BitmaskRow, bitmask_words

_MARKER = "\x02"
"""A character that no tokenizer merges; text after it is tokenized as within an answer."""


def read_tokenizer(tokenizer_json: Path) -> Tokenizer:
    """Raises ConfigError if the file is no tokenizer."""
    try:
        return load_tokenizer(tokenizer_json)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(
            f"Can't read the tokenizer {tokenizer_json}, which structured output needs: {error}"
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizerFacts:
    """A vocabulary as the backends see it. Two are equal only if they are one object."""

    tokens: TokenBytesTable
    """[vocab_size]; bytes of each token, name of a control token; b"" for an id without."""
    special_ids: frozenset[int]
    """Control tokens: never part of text."""
    eos_token_ids: tuple[int, ...]
    """Each ends an answer. All are control tokens here, also if not marked so."""
    load_tokenizer: Callable[[], Tokenizer]

    @staticmethod
    def load(
        tokenizer_json: Path,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        read: Callable[[Path], Tokenizer] = read_tokenizer,
    ) -> "TokenizerFacts":
        """Read a tokenizer.json, or the tokens that are saved beside it; then the tokenizer is read
        when it is needed.

        Args:
            vocab_size: of the model: the tokenizer may have fewer tokens or more.
            read: reads a tokenizer.json.

        Raises:
            ConfigError: the file is no tokenizer, or no end token lies in the vocabulary.
        """
        saved = SavedTokens.load(tokenizer_json)
        if saved is None:
            return TokenizerFacts.from_tokenizer(
                read(tokenizer_json), vocab_size=vocab_size, eos_token_ids=eos_token_ids
            )
        load = functools.partial(read, tokenizer_json)
        return TokenizerFacts._make(saved.table, saved.special_ids, vocab_size, eos_token_ids, load)

    @staticmethod
    def from_tokenizer(
        tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> "TokenizerFacts":
        """Take a tokenizer that is loaded; its truncation and padding are switched off. Raises
        ConfigError if no end token lies in the vocabulary."""
        source = TokenBytes(tokenizer)
        tokens = TokenBytesTable.from_tokens(map(source.bytes_of, range(vocab_size)))
        facts = TokenizerFacts._make(
            tokens, source.special_ids, vocab_size, eos_token_ids, lambda: tokenizer
        )
        facts.tokenizer  # noqa: B018 (known from now on)
        return facts

    @staticmethod
    def _make(
        tokens: TokenBytesTable,
        special_ids: Collection[int],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        load_tokenizer: Callable[[], Tokenizer],
    ) -> "TokenizerFacts":
        ends = tuple(dict.fromkeys(i for i in eos_token_ids if 0 <= i < vocab_size))
        if not ends:
            raise ConfigError(
                f"None of the end-of-sequence tokens {list(eos_token_ids)} is among the model's {vocab_size} tokens, "
                "so no grammar could end; set eos_token_id in generation_config.json."
            )
        return TokenizerFacts(
            tokens=tokens.resized(vocab_size),
            special_ids=frozenset({*ends, *(i for i in special_ids if i < vocab_size)}),
            eos_token_ids=ends,
            load_tokenizer=load_tokenizer,
        )

    @staticmethod
    def from_folder(folder: Path) -> "TokenizerFacts":
        """Load those of the model in a folder, with the end tokens of its config.json."""
        config = json.loads((folder / "config.json").read_text())
        end = config["eos_token_id"]
        return TokenizerFacts.load(
            folder / "tokenizer.json",
            vocab_size=config["vocab_size"],
            eos_token_ids=tuple(end) if isinstance(end, list) else (end,),
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokenizer has been read."""
        return "tokenizer" in self.__dict__

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without truncation and padding. Its first use may read a file, some of
        which take a second."""
        tokenizer = self.load_tokenizer()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The model's: the length of a row of logits."""
        return len(self.tokens)

    @functools.cached_property
    def eos_mask(self) -> BitmaskRow:
        """[bitmask_words]; the row that allows the end tokens alone. Read-only."""
        row = np.zeros(bitmask_words(self.vocab_size), dtype=np.uint32)
        for token_id in self.eos_token_ids:
            row[token_id // 32] |= np.uint32(1 << (token_id % 32))
        row.flags.writeable = False
        return row.view(np.int32)

    @functools.cached_property
    def special_names(self) -> dict[str, int]:
        """Ids of the control tokens, by their text."""
        return {self.tokens[i].decode(): i for i in sorted(self.special_ids) if self.tokens[i]}

    def id_of(self, name: str) -> int | None:
        """The id of a token by its name in the tokenizer, which is not its text in all of them."""
        found = self.special_names.get(name)
        return self.tokenizer.token_to_id(name) if found is None else found

    def encode(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly those of ``text``, as it would stand in the middle of
        an answer.

        They are the tokenizer's own wherever it keeps the text as it is (one that changes case, or
        adds a space in front, does not); else the longest tokens from left to right, as far as
        there are any.
        """
        expected = text.encode()
        ids = self._tokenized(text)
        if self._text_of(ids) == expected:
            return ids
        ids = self._after_marker(self._tokenized(_MARKER + text))
        if self._text_of(ids) == expected:
            return ids
        return self._longest_first(expected)

    def _tokenized(self, text: str) -> list[int]:
        """The tokenizer's ids. They are asked for as a batch, which releases Python's lock."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _text_of(self, ids: list[int]) -> bytes | None:
        """The bytes of tokens; None where an id is no text."""
        if any(i >= self.vocab_size or i in self.special_ids for i in ids):
            return None
        return b"".join(self.tokens[i] for i in ids)

    def _after_marker(self, ids: list[int]) -> list[int]:
        for index, token_id in enumerate(ids):
            if token_id < self.vocab_size and self.tokens[token_id].endswith(_MARKER.encode()):
                return ids[index + 1 :]
        return ids

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest_token), start, -1):
                if (token_id := self._ids.get(text[start:end])) is not None:
                    break
            else:
                return ids
            ids.append(token_id)
            start = end
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        usable = [i for i, token in enumerate(self.tokens) if token and i not in self.special_ids]
        return {self.tokens[i]: i for i in reversed(usable)}

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._ids), default=1)
