"""Where in a growing JSON text are the sub-values that have to be checked?

Which value a check is for is told by its path, a step a level. In an object a step that is a name means the
property of that name (compared as decoded, so ``"\\u0061"`` is ``a``), and None means any property whose name
no check names at this place; in an array None means any element, and a name means nothing. *At this place*
is meant literally: the checks whose paths are equal up to this step. So whoever writes paths

- writes None for ``additionalProperties`` only if every property that the schema declares beside it has a
  check of its own there; otherwise declared properties would be taken for others, and the check belongs to
  the enclosing object as a whole;
- writes None for ``items`` only if it holds for every element (no ``prefixItems``) and the value can't be an
  object, and a name only where nothing else applies to that property (a ``patternProperties`` that matches
  it as well is part of the same check).
"""

import json
import re
from typing import NamedTuple

from radixrt.constrained.grammar import SpanCheck


class CompletedSpan(NamedTuple):
    """A sub-value that has just ended, at ``text[start:end]`` of the whole answer."""

    check: SpanCheck
    start: int
    end: int


class _Place:
    """What the checks say of one place in the answer."""

    __slots__ = ("checks", "names", "other")

    def __init__(self) -> None:
        self.checks: list[SpanCheck] = []
        self.names: dict[str, _Place] = {}
        self.other: _Place | None = None

    def step(self, step: str | None) -> "_Place":
        """The place one level down, made if it is new."""
        if step is None:
            self.other = self.other or _Place()
            return self.other
        return self.names.setdefault(step, _Place())


class _Container(NamedTuple):
    """An object or array that is open. Never changed: marks share it."""

    parent: "_Container | None"
    is_object: bool
    place: _Place | None
    start: int
    open_since: int | None
    """Where the earliest checked value begins that this container is, or is in."""


class _Pieces(NamedTuple):
    """The text of a key, number or literal so far, last piece first."""

    before: "_Pieces | None"
    piece: str


class Mark(NamedTuple):
    """All that a tracker knows at one moment; taking one and going back to it cost no more than this tuple."""

    state: str
    offset: int
    container: _Container | None
    place: _Place | None
    start: int
    pieces: _Pieces | None
    escape: str


# What comes next. In VALUE, MAYBE_VALUE, KEY, MAYBE_KEY, COLON, AFTER white space may come first.
_VALUE, _MAYBE_VALUE = "a value", "a value or ]"
_KEY, _MAYBE_KEY, _COLON = "a property name", "a property name or }", "a colon"
_AFTER, _DONE = "a comma or a closing bracket", "nothing"
_IN_STRING, _IN_KEY, _IN_WORD = "more of a string", "more of a property name", "more of a scalar"

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_WORD = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null", re.ASCII
)
_WORD_BEGINS = frozenset("-0123456789tfn")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PREFIX = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


class SpanTracker:
    """Follows one JSON text, given in pieces that may be cut anywhere."""

    def __init__(self, checks: tuple[SpanCheck, ...]) -> None:
        root = _Place()
        for check in checks:
            place = root
            for step in check.path:
                place = place.step(step)
            place.checks.append(check)
        self._state = _VALUE
        self._offset = 0  # characters taken
        self._container: _Container | None = None
        self._place: _Place | None = root  # of the value that comes next, or of the open scalar
        self._start = 0  # of the open scalar
        self._pieces: _Pieces | None = None
        self._escape = ""  # an escape sequence that is incomplete
        self._completed: list[CompletedSpan] = []

    @property
    def offset(self) -> int:
        """Characters taken so far."""
        return self._offset

    @property
    def open_since(self) -> int | None:
        """Where the earliest checked value that is not complete begins; None if none is open."""
        if self._container is not None and self._container.open_since is not None:
            return self._container.open_since
        in_scalar = self._state is _IN_STRING or self._state is _IN_WORD
        return self._start if in_scalar and self._place and self._place.checks else None

    def mark(self) -> Mark:
        """The tracker as it is now, for :meth:`reset`."""
        return Mark(
            self._state,
            self._offset,
            self._container,
            self._place,
            self._start,
            self._pieces,
            self._escape,
        )

    def reset(self, mark: Mark) -> None:
        """Forget all text since ``mark`` was taken."""
        (
            self._state,
            self._offset,
            self._container,
            self._place,
            self._start,
            self._pieces,
            self._escape,
        ) = mark

    def push(self, text: str) -> list[CompletedSpan]:
        """Take the next piece; returns the checked values that end in it, inner before outer.

        A number ends only at what follows it, or at :meth:`finish`.

        Raises:
            ValueError: the text so far can't begin any JSON text. (A number or literal is looked at when it ends.)
        """
        self._completed = []
        at, base, end = 0, self._offset, len(text)
        while at < end:
            state = self._state
            if state is _IN_STRING or state is _IN_KEY:
                at = self._in_string(text, at, base)
            elif state is _IN_WORD:
                at = self._in_word(text, at, base)
            else:
                white_space = _WHITE_SPACE.match(text, at)
                assert white_space is not None
                at = white_space.end()
                if at < end:
                    self._structure(text[at], base + at)
                    # A word is read from its first character on.
                    at += self._state is not _IN_WORD
            self._offset = base + at
        return self._completed

    def finish(self) -> list[CompletedSpan]:
        """The text is complete; returns the checked value that ends with it: a number on its own.

        Raises:
            ValueError: something is missing.
        """
        self._completed = []
        if self._state is _IN_WORD and self._container is None:
            self._end_word(self._offset)
        if self._state is not _DONE:
            raise ValueError(f"the JSON text ends where {self._state} is due")
        return self._completed

    # ------------------------------------------------------------ one state each

    def _in_string(self, text: str, at: int, base: int) -> int:
        """Read on in a string or name that is open; returns where it stops: at its end or that of the piece."""
        begin = at
        while at < len(text):
            if self._escape:
                at = self._in_escape(text, at, base)
                continue
            plain = _PLAIN.match(text, at)
            assert plain is not None
            at = plain.end()
            if at == len(text):
                break
            if text[at] == "\\":
                self._escape = "\\"
                at += 1
            elif text[at] == '"':
                self._keep(text[begin:at])
                self._end_string(base + at + 1)
                return at + 1
            else:
                raise self._unexpected(text[at], base + at)
        self._keep(text[begin:at])
        return at

    def _in_escape(self, text: str, at: int, base: int) -> int:
        self._escape += text[at]
        if _ESCAPE.fullmatch(self._escape):
            self._escape = ""
        elif not _ESCAPE_PREFIX.fullmatch(self._escape):
            raise self._unexpected(text[at], base + at)
        return at + 1

    def _in_word(self, text: str, at: int, base: int) -> int:
        word = _WORD.match(text, at)
        assert word is not None
        self._pieces = _Pieces(self._pieces, word.group())
        if word.end() < len(text):
            self._end_word(base + word.end())
        return word.end()

    def _structure(self, character: str, offset: int) -> None:
        """Take a character that is outside of scalars and no white space."""
        state = self._state
        if state is _AFTER:
            self._after_value(character, offset)
        elif state is _VALUE or state is _MAYBE_VALUE:
            if character == "]" and state is _MAYBE_VALUE:
                self._close(offset)
            else:
                self._begin_value(character, offset)
        elif state is _COLON and character == ":":
            self._state = _VALUE
        elif character == '"' and (state is _KEY or state is _MAYBE_KEY):
            self._state, self._pieces = _IN_KEY, None
        elif character == "}" and state is _MAYBE_KEY:
            self._close(offset)
        else:
            raise self._unexpected(character, offset)

    def _after_value(self, character: str, offset: int) -> None:
        container = self._container
        assert container is not None
        if character == ",":
            if container.is_object:
                self._state = _KEY
            else:
                self._state, self._place = _VALUE, container.place and container.place.other
        elif character == ("}" if container.is_object else "]"):
            self._close(offset)
        else:
            raise self._unexpected(character, offset)

    # ------------------------------------------------------------ values begin and end

    def _begin_value(self, character: str, offset: int) -> None:
        place = self._place
        if character == "{" or character == "[":
            is_object, since = character == "{", self.open_since
            if since is None and place is not None and place.checks:
                since = offset
            self._container = _Container(self._container, is_object, place, offset, since)
            self._state = _MAYBE_KEY if is_object else _MAYBE_VALUE
            self._place = None if is_object else place and place.other
        elif character == '"':
            self._state, self._start = _IN_STRING, offset
        elif character in _WORD_BEGINS:
            self._state, self._start, self._pieces = _IN_WORD, offset, None
        else:
            raise self._unexpected(character, offset)

    def _close(self, offset: int) -> None:
        container = self._container
        assert container is not None
        self._container = container.parent
        self._end_value(container.place, container.start, offset + 1)

    def _end_word(self, end: int) -> None:
        word = _joined(self._pieces)
        if not _WHOLE_WORD.fullmatch(word):
            raise ValueError(f"{word[:40]!r} at {self._start} is no JSON value")
        self._end_value(self._place, self._start, end)

    def _end_string(self, end: int) -> None:
        if self._state is _IN_STRING:
            self._end_value(self._place, self._start, end)
            return
        place = self._container and self._container.place
        self._state, self._place = _COLON, None
        if place is not None:
            raw = _joined(self._pieces)
            name = json.loads(f'"{raw}"') if "\\" in raw else raw
            self._place = place.names.get(name, place.other)

    def _end_value(self, place: _Place | None, start: int, end: int) -> None:
        if place is not None:
            self._completed += [CompletedSpan(check, start, end) for check in place.checks]
        self._state = _DONE if self._container is None else _AFTER

    def _keep(self, piece: str) -> None:
        """Remember a piece of a name, if names matter here."""
        if self._state is _IN_KEY and self._container and self._container.place:
            self._pieces = _Pieces(self._pieces, piece)

    def _unexpected(self, character: str, offset: int) -> ValueError:
        return ValueError(f"{character!r} at {offset} where {self._state} is due")


def _joined(pieces: _Pieces | None) -> str:
    """The whole text of a key, number or literal."""
    texts = []
    while pieces is not None:
        texts.append(pieces.piece)
        pieces = pieces.before
    return "".join(reversed(texts))
