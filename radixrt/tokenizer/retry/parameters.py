"""Finds the values to validate in a tool call whose parameters are written one by one.

A value is JSON, or a text in the format's own way, which has no checks. The paths of checks are
those of the arguments as one object.
"""

import re

from radixrt.constrained.grammar import CheckedParameters, SpanCheck
from radixrt.constrained.parameters import STYLES
from radixrt.tokenizer.retry.spans import CompletedSpan, Scanner, SpanTracker

_HEAD, _VALUE, _JSON = "a parameter or the end", "a value", "more of a value"
_QUOTE, _TEXT, _CLOSING, _DONE = "a quote", "more of a text", "the end of a value", "nothing"


class ParameterTracker(Scanner):
    """Scans the parameters of one call and its end."""

    STATE = ("offset", "_state", "_name", "_known")

    def __init__(self, parameters: CheckedParameters, checks: tuple[SpanCheck, ...]) -> None:
        style = STYLES[parameters.style]
        opening, sign = map(re.escape, style.opening)
        self._begin = re.compile(f"(?:{re.escape(style.separator)})?{opening}({style.names}){sign}")
        self._end = parameters.end
        self._texts = frozenset(parameters.texts)
        self._quote, self._closing = style.quote, style.closing
        self._values = SpanTracker(checks)
        self.restart(0)

    def restart(self, offset: int) -> None:
        self.offset, self._state, self._inside = offset, _HEAD, None
        self._name = ""
        """Name of the open parameter."""
        self._known = ""
        """The beginning of a parameter so far; of a text, what may belong to the mark at its
        end."""

    @property
    def is_done(self) -> bool:
        return self._state is _DONE

    def push(self, text: str, *, ends_inside: bool = True) -> list[CompletedSpan]:
        completed: list[CompletedSpan] = []
        while text and not self.is_done:
            if self._state is _VALUE:
                self._begin_value(text[0])
            if self._state is _JSON:
                completed += self._values.push(text, ends_inside=True)
                taken = self._values.offset - self.offset
                if self._values.is_done:
                    self._state, self._inside = _CLOSING if self._closing else _HEAD, None
            elif self._state is _HEAD:
                taken = self._take_head(text)
            elif self._state is _QUOTE:
                taken = self._to(self._quote, text, _TEXT)
            elif self._state is _TEXT:
                taken = self._to(self._quote + self._closing, text, _HEAD)
            else:
                taken = self._to(self._closing, text, _HEAD)
            self.offset += taken
            text = text[taken:]
        return completed

    def finish(self) -> list[CompletedSpan]:
        raise ValueError(f"the text ends where {self._state} is due")

    # ------------------------------------------------------------ inside

    def _take_head(self, text: str) -> int:
        """Read on in the beginning of a parameter, or in the end of the call; returns how many
        characters it took."""
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
        self._known = ""
        if is_text:
            self._state = _QUOTE if self._quote else _TEXT
        else:
            self._state, self._inside = _JSON, self._values
            self._values.begin_property(self._name, self.offset)

    def _to(self, mark: str, text: str, following: str) -> int:
        """Read on to a mark's end, where another state begins; returns the characters taken."""
        if (taken := self._take_to(mark, text)) is None:
            return len(text)
        self._state = following
        return taken
