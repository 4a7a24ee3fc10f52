"""Incremental detokenization: text for one token at a time that adds up to the decoding of the
whole."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MIN_CONTEXT_TOKENS = 8
MAX_CONTEXT_TOKENS = 256
"""Prompt tokens that the decoder sees before the answer. More than the least are needed only inside
a long run of byte-fallback tokens, which decoders take as one."""

MAX_PENDING_TOKENS = 64
"""A character is at most four bytes, so as many tokens without a complete one are not text (or they
spell U+FFFD itself, which looks the same); they are given out as U+FFFD rather than decoded again
and again at a growing cost."""

MAX_INCOMPLETE_TOKENS = 3
"""The first bytes of a character that is not complete."""

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one answer, token by token; complete characters only.

    >>> from tokenizers import Tokenizer, decoders, models
    >>> tokenizer = Tokenizer(models.WordLevel({"Hel": 0, "lo": 1}, unk_token="Hel"))
    >>> tokenizer.decoder = decoders.Fuse()
    >>> detokenizer = IncrementalDetokenizer(tokenizer, special_ids=frozenset())
    >>> detokenizer.push(0), detokenizer.push(1), detokenizer.flush()
    ('Hel', 'lo', '')

    With ``context_ids`` (the end of a prompt that the answer continues), the text is the addition
    of the answer to the decoded prompt, with a leading space if there is one. Without them the
    answer is decoded alone.
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
        self._context = self._end_of_prompt(context_ids)
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
        return self._give_out_garbage() if len(self._pending) > MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        """The rest, with U+FFFD for incomplete characters."""
        return self._restart() if self._pending else ""

    def _end_of_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, as few as make whole characters.

        None where the prompt itself ends inside a character: DecodeStream would give out the
        prompt's text again once that is complete.
        """
        ids = [t for t in prompt_ids[-MAX_CONTEXT_TOKENS:] if t not in self._skipped_ids]
        length = MIN_CONTEXT_TOKENS
        while ids:
            if not self._decode(ids[-length:]).endswith(_REPLACEMENT):
                return ids[-length:]
            if length >= len(ids):
                break
            length *= 2
        return []

    def _give_out_garbage(self) -> str:
        """Return the pending text, except an end that may be an incomplete character."""
        whole = self._decode(self._pending)
        keep = len(self._pending) - MAX_INCOMPLETE_TOKENS
        while self._decode(self._pending[:keep]) + self._decode(self._pending[keep:]) != whole:
            keep -= 1  # it would cut a character in two
        self._pending, rest = self._pending[:keep], self._pending[keep:]
        text = self._restart() if self._pending else ""
        return text + "".join(map(self.push, rest))

    def _restart(self) -> str:
        """Return all pending text and start again.

        Byte-fallback decoders may take back a character when an invalid byte follows it (they
        replace a whole run of bytes), which DecodeStream answers with an exception. Text that was
        returned cannot be taken back, so the following tokens are decoded separately.
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


class StopStringFinder:
    """Passes text through, but holds back an end that may be the beginning of a stop string.

    >>> stops = StopStringFinder(("END",))
    >>> stops.push("a cat E"), stops.push("ND and more")
    (('a cat ', None), ('', 'END'))

    The answer ends before the stop string that is complete first; of several that are complete at
    the same character, before the longest. The outcome does not depend on how the text is cut in
    pieces.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops = stops
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is now certain to belong to the answer, and the stop string if one
        is complete. After a stop string, nothing more may be pushed."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop)] if self._include_in_output else text[:start], stop
        certain = len(text) - self._undecided_length(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text that was held back: no more will come, so it is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _undecided_length(self, text: str) -> int:
        """Length of the longest end of the text that begins some stop string."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                else:
                    start = text.find(stop[0], start + 1)
        return len(text) - earliest
