"""Finds the sub-values to validate in a growing JSON text.

The path of a check names its values, one step per level. In an object, a name means the property of
that name (compared after decoding, so ``"\\u0061"`` is ``a``), and None means any property that no
check names at this place. In an array, None means any element, and a name matches nothing. *This
place* means: among the checks whose paths are equal up to this step. So the author of paths

- writes None for ``additionalProperties`` only if every property that the schema declares beside it
  has a check of its own there. Otherwise declared properties would be taken for additional ones,
  and the check belongs to the enclosing object as a whole;
- writes None for ``items`` only if it applies to every element (no ``prefixItems``) and the value
  can't be an object; and writes a name only if nothing else applies to that property (a
  ``patternProperties`` that matches it is part of the same check).
"""

import abc
import json
import re
from typing import Any, ClassVar, NamedTuple

from radixrt.constrained.grammar import SpanCheck


class CompletedSpan(NamedTuple):
    """A sub-value that has just ended, at ``text[start:end]`` of the whole answer."""

    check: SpanCheck
    start: int
    end: int


class _Place:
    """The checks that apply at one place in the answer."""

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
    """An object or array that is open. It never changes: checkpoints share it."""

    parent: "_Container | None"
    is_object: bool
    place: _Place | None
    start: int
    open_since: int | None
    """Where the earliest checked value begins that this container is, or is in."""


class _Pieces(NamedTuple):
    """The text of a name so far, last piece first."""

    before: "_Pieces | None"
    piece: str


Checkpoint = tuple[Any, ...]
"""All that a scanner knows at one moment; taking one and going back cost a small tuple."""


class Scanner(abc.ABC):
    """Follows a growing text in pieces cut anywhere. The grammar ensures its form."""

    STATE: ClassVar[tuple[str, ...]]
    """The attributes that change."""
    offset: int
    """Characters taken so far."""
    _inside: "Scanner | None" = None
    """The scanner of a part of the text that is open."""
    _known: str
    """Text that may belong to a mark that has not ended."""

    def checkpoint(self) -> Checkpoint:
        """The scanner as it is now, for :meth:`reset`."""
        inside = None if self._inside is None else self._inside.checkpoint()
        return *(getattr(self, name) for name in self.STATE), self._inside, inside

    def reset(self, checkpoint: Checkpoint) -> None:
        """Forget all text since the checkpoint was taken."""
        *values, self._inside, inside = checkpoint
        for name, value in zip(self.STATE, values, strict=True):
            setattr(self, name, value)
        if self._inside is not None:
            self._inside.reset(inside)

    @property
    def open_since(self) -> int | None:
        """Where the earliest checked value that is not complete begins; None if none is open."""
        return None if self._inside is None else self._inside.open_since

    @property
    def is_done(self) -> bool:
        """Whether the text is known to be complete."""
        return False

    def _take_to(self, mark: str, text: str) -> int | None:
        """Read on to the end of a mark; returns how many characters that took. None: all of them,
        and the mark has not ended."""
        before, known = len(self._known), self._known + text
        at = known.find(mark)
        self._known = "" if at >= 0 else known[max(len(known) - len(mark) + 1, 0) :]
        return None if at < 0 else at + len(mark) - before

    @abc.abstractmethod
    def restart(self, offset: int) -> None:
        """Forget all text; the next begins at an offset of the answer."""

    @abc.abstractmethod
    def push(self, text: str, *, ends_inside: bool = False) -> list[CompletedSpan]:
        """Take the next piece; returns the checked values that end in it, inner before outer.

        A number ends only at the character after it, or at :meth:`finish`.

        Args:
            ends_inside: leave what follows the text in this piece; :attr:`offset` says how much was
                taken.

        Raises:
            ValueError: something is closed or goes on that is not open.
        """

    @abc.abstractmethod
    def finish(self) -> list[CompletedSpan]:
        """The text is complete; returns the checked value that ends with it: a number on its own.
        Raises ValueError if something is missing."""


# The text expected next, apart from white space, commas, colons and closing brackets.
_VALUE, _NAME, _DONE = "a value", "a property name", "nothing"
_IN_STRING, _IN_NAME, _IN_WORD = "more of a string", "more of a property name", "more of a scalar"

_SKIPPED = re.compile(r"[ \t\n\r:]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")


class SpanTracker(Scanner):
    """Scans one JSON text. Other texts raise an error or give meaningless spans."""

    STATE = ("offset", "_state", "_container", "_place", "_start", "_pieces", "_is_escaped")
    _state: str
    _container: _Container | None
    _place: _Place | None
    """The place of the value that comes next, or of the open scalar."""
    _start: int
    """Where the open scalar begins."""
    _pieces: _Pieces | None
    _is_escaped: bool
    """The last character taken is an unescaped backslash inside a string."""

    def __init__(self, checks: tuple[SpanCheck, ...]) -> None:
        self._root = _Place()
        for check in checks:
            place = self._root
            for step in check.path:
                place = place.step(step)
            place.checks.append(check)
        self._completed: list[CompletedSpan] = []
        self.restart(0)

    def restart(self, offset: int) -> None:
        self._begin(self._root, offset)

    def begin_property(self, name: str, offset: int) -> None:
        """Forget all text; the value of a property of the whole comes next, without its object."""
        self._begin(self._root.names.get(name, self._root.other), offset)

    def _begin(self, place: _Place | None, offset: int) -> None:
        self._state, self._place, self.offset = _VALUE, place, offset
        self._container, self._start, self._pieces, self._is_escaped = None, 0, None, False

    @property
    def open_since(self) -> int | None:
        if self._container is not None and self._container.open_since is not None:
            return self._container.open_since
        in_scalar = self._state is _IN_STRING or self._state is _IN_WORD
        return self._start if in_scalar and self._place and self._place.checks else None

    @property
    def is_done(self) -> bool:
        return self._state is _DONE

    def push(self, text: str, *, ends_inside: bool = False) -> list[CompletedSpan]:
        self._completed = []
        at, base = 0, self.offset
        while at < len(text) and not (ends_inside and self.is_done):
            if self._state is _IN_STRING or self._state is _IN_NAME:
                at = self._in_string(text, at, base)
            elif self._state is _IN_WORD:
                end = _end_of(_WORD, text, at)
                if end < len(text):
                    self._end_value(self._place, self._start, base + end)
                at = end
            else:
                at = _end_of(_SKIPPED, text, at)
                if at < len(text):
                    self._structure(text[at], base + at)
                    at += 1
            self.offset = base + at
        return self._completed

    def finish(self) -> list[CompletedSpan]:
        self._completed = []
        if self._state is _IN_WORD and self._container is None:
            self._end_value(self._place, self._start, self.offset)
        if self._state is not _DONE:
            raise ValueError(f"the JSON text ends where {self._state} is due")
        return self._completed

    def _in_string(self, text: str, at: int, base: int) -> int:
        """Read on in an open string or name; returns where it stops: its end or the piece's."""
        begin = at
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            at = _end_of(_PLAIN, text, at)
            if text[at : at + 1] == '"':
                self._keep(text[begin:at])
                self._end_string(base + at + 1)
                return at + 1
            self._is_escaped = text[at : at + 1] == "\\"
            at += self._is_escaped
        self._keep(text[begin:at])
        return at

    def _structure(self, character: str, offset: int) -> None:
        """Take a character that is outside of scalars and no white space."""
        container = self._container
        if self._state is _DONE or (container is None and character in "}],"):
            raise ValueError(f"{character!r} at {offset} where {self._state} is due")
        if character in "{[":
            self._open(character == "{", offset)
        elif container and character in "}]":
            self._container = container.parent
            self._end_value(container.place, container.start, offset + 1)
        elif container and character == ",":
            if container.is_object:
                self._state = _NAME
            else:
                self._state, self._place = _VALUE, container.place and container.place.other
        elif character != '"':
            self._state, self._start = _IN_WORD, offset
        elif self._state is _NAME:
            self._state, self._pieces = _IN_NAME, None
        else:
            self._state, self._start = _IN_STRING, offset

    def _open(self, is_object: bool, offset: int) -> None:
        place, since = self._place, self.open_since
        if since is None and place is not None and place.checks:
            since = offset
        self._container = _Container(self._container, is_object, place, offset, since)
        self._state = _NAME if is_object else _VALUE
        self._place = None if is_object else place and place.other

    def _end_string(self, end: int) -> None:
        if self._state is _IN_STRING:
            self._end_value(self._place, self._start, end)
            return
        place = self._container and self._container.place
        self._state, self._place = _VALUE, None
        if place is not None:
            raw = _joined(self._pieces)
            name = json.loads(f'"{raw}"') if "\\" in raw else raw
            self._place = place.names.get(name, place.other)

    def _end_value(self, place: _Place | None, start: int, end: int) -> None:
        if place is not None:
            self._completed += [CompletedSpan(check, start, end) for check in place.checks]
        self._state = _DONE if self._container is None else _VALUE

    def _keep(self, piece: str) -> None:
        """Remember a piece of a name, if a check names properties here."""
        if self._state is _IN_NAME and self._container and self._container.place:
            self._pieces = _Pieces(self._pieces, piece)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the longest match at a place ends; the patterns match everywhere."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def _joined(pieces: _Pieces | None) -> str:
    """The whole text of a name."""
    texts = []
    while pieces is not None:
        texts.append(pieces.piece)
        pieces = pieces.before
    return "".join(reversed(texts))
