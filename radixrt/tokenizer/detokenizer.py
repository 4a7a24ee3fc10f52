"""How do token ids become text one at a time, and still equal the decoding of the whole?"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 8
"""Prompt tokens that the decoder sees before the answer: enough for any character or word border."""

MAX_PENDING_TOKENS = 16
"""A character is at most four bytes, so more tokens than this without a complete one are not text;
they are given out as U+FFFD rather than decoded again and again at a growing cost."""

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one answer, token by token; complete characters only.

    Where ``context_ids`` are given (the end of a prompt that the answer continues), the text is what the
    answer adds to the decoded prompt, a leading space included. Without them the answer stands alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int],
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = special_ids if skip_special_tokens else frozenset()
        self._context = [t for t in context_ids if t not in self._skipped_ids][-CONTEXT_TOKENS:]
        if self._context and self._decode(self._context).endswith(_REPLACEMENT):
            # DecodeStream would give out the prompt's text again once its last character is complete.
            self._context = []
        self._pending: list[int] = []
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        """The text that this token completes; often "" inside a character of several tokens."""
        if token_id in self._skipped_ids:  # they leave no text, and would pile up in the stream
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises a bare Exception: see _restart
            return self._restart()
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        return self._restart() if len(self._pending) > MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        """The rest, with U+FFFD for incomplete characters."""
        return self._restart() if self._pending else ""

    def _restart(self) -> str:
        """Give out what is pending and begin anew.

        Byte-fallback decoders may take back a character when an invalid byte follows it (they replace a
        whole run of bytes), which DecodeStream answers with an exception. What is given out can't be
        taken back, so what follows is decoded on its own.
        """
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        text = whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)
        self._context, self._pending = self._pending, []
        if self._decode(self._context).endswith(_REPLACEMENT):
            self._context = []
        self._stream = self._new_stream()
        return text

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
