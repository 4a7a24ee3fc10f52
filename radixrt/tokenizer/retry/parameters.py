"""Finds the values to validate in a tool call whose parameters are written one by one.

A value is JSON, or a text in the format's own way, which has no checks. The paths of checks are those of the arguments as one object.
"""

import re
from typing import NamedTuple

from radixrt.constrained.grammar import CheckedParameters, SpanCheck
from radixrt.constrained.parameters import STYLES
from radixrt.tokenizer.retry import spans
from radixrt.tokenizer.retry.spans import CompletedSpan, SpanTracker

_HEAD, _VALUE, _JSON = "a parameter or the end", "a value", "more of a value"
_QUOTE, _TEXT, _CLOSING, _DONE = "a quote", "more of a text", "the end of a value", "nothing"


class Mark(NamedTuple):
    """All that a tracker knows at one moment."""

    state: str
    offset: int
    """Characters taken."""
    name: str
    """Of the open parameter."""
    known: str
    """Of the beginning of a parameter: all; of a text: what may belong to the mark at its end."""
    value: spans.Mark | None


class ParameterTracker:
    """Follows the parameters of one call and its end, in pieces that may be cut anywhere. The grammar ensures their form. The
    interface is that of :class:`radixrt.tokenizer.retry.spans.SpanTracker`."""

    def __init__(self, parameters: CheckedParameters, checks: tuple[SpanCheck, ...]) -> None:
        style = STYLES[parameters.style]
        opening, sign = map(re.escape, style.opening)
        self._begin = re.compile(f"(?:{re.escape(style.separator)})?{opening}({style.names}){sign}")
        self._end = parameters.end
        self._texts = frozenset(parameters.texts)
        self._quote, self._closing = style.quote, style.closing
        self._values = SpanTracker(checks)
        self.reset(Mark(_HEAD, 0, "", "", None))

    @property
    def offset(self) -> int:
        """Characters taken so far."""
        return self._offset

    @property
    def open_since(self) -> int | None:
        """Where the earliest checked value that is not complete begins; None if none is open."""
        return self._values.open_since if self._state is _JSON else None

    @property
    def is_done(self) -> bool:
        """The end of the call was taken."""
        return self._state is _DONE

    def mark(self) -> Mark:
        """The tracker as it is now, for :meth:`reset`."""
        value = self._values.mark() if self._state is _JSON else None
        return Mark(self._state, self._offset, self._name, self._known, value)

    def reset(self, mark: Mark) -> None:
        """Forget all text since ``mark`` was taken."""
        self._state, self._offset, self._name, self._known, value = mark
        if value is not None:
            self._values.reset(value)

    def push(self, text: str, *, ends_inside: bool = True) -> list[CompletedSpan]:
        """Take the next piece up to the end of the call; returns the checked values that end in it, inner before outer."""
        completed: list[CompletedSpan] = []
        while text and not self.is_done:
            if self._state is _VALUE:
                self._begin_value(text[0])
            if self._state is _JSON:
                completed += self._values.push(text, ends_inside=True)
                taken = self._values.offset - self._offset
                if self._values.is_done:
                    self._state, self._known = _CLOSING if self._closing else _HEAD, ""
            elif self._state is _HEAD:
                taken = self._take_head(text)
            elif self._state is _QUOTE:
                taken = self._to(self._quote, text, _TEXT)
            elif self._state is _TEXT:
                taken = self._to(self._quote + self._closing, text, _HEAD)
            else:
                taken = self._to(self._closing, text, _HEAD)
            self._offset += taken
            text = text[taken:]
        return completed

    def finish(self) -> list[CompletedSpan]:
        """The text is complete.

        Raises:
            ValueError: the call is not.
        """
        raise ValueError(f"the text ends where {self._state} is due")

    # ------------------------------------------------------------ inside

    def _take_head(self, text: str) -> int:
        """Read on in the beginning of a parameter, or in the end of the call; returns how many characters it took."""
        for count, character in enumerate(text, 1):
            self._known += character
            if self._known == self._end:
                self._state = _DONE
            elif begun := self._begin.fullmatch(self._known):
                self._state, self._name = _VALUE, begun[1]
            else:
                continue
            return count
        return len(text)

    def _begin_value(self, first: str) -> None:
        if self._quote:
            is_text = first == self._quote[0]  # JSON begins with none of these
        else:
            is_text = not self._texts.isdisjoint((self._name, ""))
        self._state, self._known = _QUOTE if is_text else _JSON, ""
        if is_text and not self._quote:
            self._state = _TEXT
        self._values.begin(self._name, self._offset)

    def _to(self, mark: str, text: str, following: str) -> int:
        """Read on to the end of a mark, where another state begins; returns how many characters it took."""
        before, known = len(self._known), self._known + text
        at = known.find(mark)
        if at < 0:
            self._known = known[max(len(known) - len(mark) + 1, 0) :]
            return len(text)
        self._state, self._known = following, ""
        return at + len(mark) - before
