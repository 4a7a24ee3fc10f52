"""Checks that a prompt fits the engine, once, so that the scheduler need not."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RequestError
from radixrt.messages.answers import EngineInfo

_TOO_LONG = "context_length_exceeded"

CALL_CONTEXTS = 4
"""Most tokens of a call to the tokenizer alone, in multiples of the context length, ..."""
MIN_CALL_TOKENS = 1 << 16
"""... but at least this number; ..."""
CALL_CHARS_PER_TOKEN = 4
"""... for texts, in characters a token."""


CHARS_PER_TOKEN = 8
"""A text with more characters than that for each token of the context is hardly ever one that fits,
..."""
_PIECE_CHARS = 1 << 16
"""... so the tokens of pieces of this size are counted first. A megabyte can have three million
tokens, which take 200 MB."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the engine, in tokens."""

    context_length: int
    kv_pool_tokens: int
    vocab_size: int

    @staticmethod
    def from_info(info: EngineInfo) -> "Limits":
        return Limits(info.context_length, info.kv_pool_tokens, info.vocab_size)

    @property
    def call_tokens(self) -> int:
        """Most token ids that /detokenize takes."""
        return max(MIN_CALL_TOKENS, CALL_CONTEXTS * self.context_length)

    def check_call(self, size: int, is_text: bool) -> None:
        """Refuse a call to tokenize or detokenize that would take many seconds.

        Raises:
            RequestError: it is several times as long as any prompt could be.
        """
        limit = self.call_tokens * CALL_CHARS_PER_TOKEN if is_text else self.call_tokens
        if size > limit:
            unit = "characters" if is_text else "token ids"
            raise RequestError(
                f"{size} {unit} are too many; this server takes at most {limit} here. Send them in pieces.",
                status=413,
                param="prompt" if is_text else "tokens",
            )

    def check_text(self, text: str, longest_token: int, count: Callable[[str], int]) -> None:
        """Refuse a text that is too long, before all of it is tokenized.

        Args:
            longest_token: in characters.
            count: the number of tokens of a text.

        Raises:
            RequestError: even in tokens of the greatest length the text is over the context; or
                pieces of it, one after the other, have several times as many tokens.
        """
        at_least = len(text) // longest_token
        is_too_long = at_least > self.context_length
        if not is_too_long and len(text) > CHARS_PER_TOKEN * self.context_length:
            at_least = 0
            for start in range(0, len(text), _PIECE_CHARS):
                at_least += count(text[start : start + _PIECE_CHARS])
                if is_too_long := at_least > self.call_tokens:
                    break
        if is_too_long:
            raise RequestError(
                f"This model's maximum context length is {self.context_length} tokens. The prompt has {len(text)} characters, "
                f"which are at least {at_least} tokens. Shorten it.",
                param="prompt",
                code=_TOO_LONG,
            )

    def check_num_tokens(self, num_tokens: int) -> None:
        """Refuse a text that turns out far too long when it is tokenized.

        Raises:
            RequestError: it has several times as many tokens as the context.
        """
        if num_tokens > self.call_tokens:
            self.max_tokens(num_tokens, None)

    def check_token_ids(self, ids: NDArray[np.integer]) -> None:
        """Raises RequestError if an id is not in the vocabulary."""
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(outside):
            raise RequestError(
                f"The prompt's token id {ids[outside[0]]} at position {outside[0]} is not in the model's vocabulary; "
                f"ids go from 0 to {self.vocab_size - 1}.",
                param="prompt",
            )

    def max_tokens(self, prompt_length: int, requested: int | None) -> int:
        """Most tokens to generate: ``requested`` (0: only the prompt is computed), else all that
        fit.

        Raises:
            RequestError: the prompt is empty, or prompt and answer don't fit.
        """
        if prompt_length == 0:
            raise RequestError("The prompt is empty; give at least one token.", param="prompt")
        left = min(self.context_length, self.kv_pool_tokens) - prompt_length
        needed = 1 if requested is None else requested
        if left >= needed:
            return left if requested is None else requested
        if self.context_length - prompt_length < needed:
            limit = f"This model's maximum context length is {self.context_length} tokens."
        else:
            limit = (
                f"The server's KV cache holds {self.kv_pool_tokens} tokens (--max-total-tokens)."
            )
        wanted = ""
        if requested is None:
            wanted = " and the answer needs at least 1"
        elif requested:
            wanted = f" and max_tokens asks for {requested}, {prompt_length + requested} together"
        raise RequestError(
            f"{limit} The prompt has {prompt_length} tokens{wanted}. Shorten the prompt"
            + (" or lower max_tokens." if requested else "."),
            param="max_tokens" if left >= 1 and needed else "prompt",
            code=_TOO_LONG,
        )
