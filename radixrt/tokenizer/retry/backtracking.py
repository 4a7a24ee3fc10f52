"""Chooses the position in a failed value where the next retry must differ.

Forbidding only the last token of a failed value explores uselessly (``[1,1]`` becomes ``[1,1,1]``);
forbidding the first discards the valid part. The validator's errors point closer. *Candidates* are
positions in the failed text, the likeliest cause first. At the chosen position every token that
would continue along the failed text is forbidden, and also at the next few decisions, in case the
grammar leaves no other token there (the worker ignores a set that would forbid every token). Retry
n takes candidate 0, 1, 0, 2, 0, 1, 0, 3, …: half of the retries go to the likeliest position, and
every position has its turn (the ruler sequence; Luby, Sinclair and Zuckerman, "Optimal speedup of
Las Vegas algorithms", 1993, on why). docs/internals/checked_spans.md compares it with simpler
policies.
"""

import bisect
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from radixrt.constrained.grammar import Path, SpanError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[-+.0-9A-Za-z]+|[{}\[\]:]', re.DOTALL)


@dataclasses.dataclass
class ValuePosition:
    """A value at ``text[start:end]``."""

    start: int
    end: int = -1
    kind: str = ""
    """Its first character."""
    step: str | int = 0
    """Property name or index in the enclosing value."""
    step_start: int = 0
    """Start of the part: of the property's name, after the quote, or of the value itself."""
    parts: "list[ValuePosition]" = dataclasses.field(default_factory=list)

    @property
    def is_container(self) -> bool:
        return self.kind in "{["

    @property
    def content_start(self) -> int:
        """Its first character that is not forced by its type: that after the quote, of a string."""
        return self.start + (self.kind == '"')

    def find(self, path: Path) -> "ValuePosition":
        """The part at a path, or the last one on the way to it that exists."""
        position = self
        for step in path:
            # The last of equal names is the one that a decoder keeps.
            part = next((part for part in reversed(position.parts) if part.step == step), None)
            if part is None:
                break
            position = part
        return position

    def leaves(self) -> "Iterator[ValuePosition]":
        """The scalars in it (itself, if it is one) and empty containers, in order."""
        stack = [self]
        while stack:
            position = stack.pop()
            if position.parts:
                stack.extend(reversed(position.parts))
            else:
                yield position


def locate(text: str, start: int) -> ValuePosition:
    """The parts of the one complete and valid JSON value that begins at ``start``."""
    open_containers: list[ValuePosition] = []
    name: re.Match[str] | None = None
    for token in _TOKEN.finditer(text, start):
        kind = token.group()[0]
        if kind == ":":
            continue
        if kind in "}]":
            value = open_containers.pop()
        elif kind == '"' and name is None and open_containers and open_containers[-1].kind == "{":
            name = token
            continue
        else:
            value = ValuePosition(token.start(), kind=kind)
            _attach(value, open_containers, name)
            name = None
            if value.is_container:
                open_containers.append(value)
                continue
        value.end = token.end()
        if not open_containers:
            return value
    raise ValueError("the value is not complete")


def _attach(
    value: ValuePosition, open_containers: list[ValuePosition], name: re.Match[str] | None
) -> None:
    """Make ``value`` the next part of the innermost container, if there is one."""
    value.step_start = value.start
    if not open_containers:
        return
    value.step = len(open_containers[-1].parts)
    if name is not None:
        value.step, value.step_start = json.loads(name.group()), name.start() + 1
    open_containers[-1].parts.append(value)


WINDOW = 8
"""Decisions from a place on at which the failed path is forbidden."""

_LACKING = frozenset(
    {
        *("contains", "minContains", "required", "minItems", "minProperties"),
        *("dependentRequired", "dependencies"),
    }
)
"""Something is missing: the value ended too soon."""


@dataclasses.dataclass(frozen=True)
class FailedSpan:
    """A value that is not valid, as tokens from its point of return on."""

    text: str
    """The text from the point of return to the end of the value."""
    value_start: int
    """Where the value begins: the first token may also hold the end of the text before."""
    token_ids: list[int]
    """Up to the one that completed the value: of a number, that is the one behind it."""
    token_starts: list[int]
    """Where each token's text begins in ``text``; ascending."""
    spent: frozenset[int]
    """Indices of tokens that have no alternative left."""
    errors: list[SpanError]
    full: frozenset[object] = frozenset()
    """The :attr:`fullness` of earlier values from here on that could not be made longer."""
    num_failures: int = 1
    """Failures of values that began here, this one included."""

    @cached_property
    def position(self) -> ValuePosition:
        return locate(self.text, self.value_start)

    @property
    def sound_characters(self) -> int | None:
        """Length of the valid part, up to the likeliest cause; None if something is missing."""
        if any(error.keyword in _LACKING for error in self.errors):
            return None
        places = [self.position.find(_likeliest_cause(error)) for error in self.errors]
        return min((place.start for place in places), default=0)

    @property
    def fullness(self) -> object:
        """Two values that are equal in this can probably be continued in the same ways: arrays of
        one length, objects with the same last property (properties come in a fixed order)."""
        parts = self.position.parts
        return (self.position.kind, parts[-1].step) if parts else None

    @property
    def is_full(self) -> bool:
        """The value had to end where it did."""
        end = self.depth_of(self.position.end - 1)
        return self.position.is_container and (end in self.spent or self.fullness in self.full)

    def depth_of(self, offset: int) -> int:
        """Which token holds a character of ``text``, or its first bytes."""
        depth = max(bisect.bisect_right(self.token_starts, offset) - 1, 0)
        return bisect.bisect_left(self.token_starts, self.token_starts[depth])


@dataclasses.dataclass(frozen=True)
class BacktrackPoint:
    """The decisions to forbid. The answer goes back to the first of them."""

    depths: list[int]
    """Indices of tokens that must not come again after those before them; ascending."""
    end: int
    """End of the part of the failed text that is known to be wrong, or of the text."""
    lead: int = 0
    """Leading characters of the first token that are not known to be wrong: a comma."""
    others: tuple[str, ...] = ()
    """Other texts from there on, lead included, that would be wrong as well."""


def choose_backtrack_point(failed: FailedSpan) -> BacktrackPoint | None:
    """The policy: candidates ordered by the errors, chosen by the ruler sequence; None if no
    position of the value has an alternative left."""
    windows = list(_windows(failed))
    if not windows:
        return None
    chosen, start, end = windows[min(ruler(failed.num_failures), len(windows) - 1)]
    lead = max(start - failed.token_starts[chosen[0]], 0)
    unsuited = {
        failed.position.find(path).end for error in failed.errors for path in error.unsuited
    }
    wrong_until = end if end in unsuited else failed.position.end
    return BacktrackPoint(chosen, wrong_until, lead, _equally_unsuited(failed, start, lead))


def ruler(number: int) -> int:
    """0, 1, 0, 2, 0, 1, 0, 3, … for 1, 2, 3, …: how often two divides the number."""
    return (number & -number).bit_length() - 1


def _windows(failed: FailedSpan) -> Iterator[tuple[list[int], int, int]]:
    """Each candidate's decisions that are left, with its range of text; each place once."""
    seen = set()
    for start, end in _candidates(failed):
        first, last = failed.depth_of(start), failed.depth_of(max(end - 1, start))
        window = [
            depth
            for depth in range(first, min(last + 1, first + WINDOW))
            if depth not in failed.spent
        ]
        place = window and (window[0], max(start, failed.token_starts[window[0]]))
        if place and place not in seen:
            seen.add(place)
            yield window, start, end


def _candidates(failed: FailedSpan) -> Iterator[tuple[int, int]]:
    """Ranges of ``failed.text`` in which to leave it, the most promising first."""
    whole = failed.position
    for error in failed.errors:
        value = whole.find(error.path)
        if error.keyword in _LACKING and not (value is whole and failed.is_full):
            yield value.end - 1, value.end
    for error in failed.errors:
        yield from _by_causes(whole, error)
    for error in failed.errors:
        yield from _by_structure(whole.find(error.path))
    yield whole.start, whole.end
    # The last resort: every single decision, the latest first. The delimiter of a number is one.
    for start in reversed(failed.token_starts):
        yield start, start + 1


def _by_causes(whole: ValuePosition, error: SpanError) -> Iterator[tuple[int, int]]:
    """Other values for the unsuited parts; other properties, or none, for superfluous ones."""
    value = whole.find(error.path)
    superfluous = _in_reverse(whole.find(path) for path in error.superfluous)
    unsuited = _in_reverse(whole.find(path) for path in error.unsuited)
    for part in unsuited:
        yield from _content(part)
    for part in superfluous:
        another, none = (part.step_start, part.end), (_end_before(value, part), part.start)
        yield from (none, another) if part is value.parts[-1] else (another, none)
    if value.kind == "[" and error.keyword not in _LACKING:
        yield from ((_end_before(value, part), part.start) for part in unsuited)
    if error.keyword in _LACKING and value.parts:
        yield from _content(value.parts[-1])


def _end_before(value: ValuePosition, part: ValuePosition) -> int:
    """Where a container could have been closed instead of going on to one of its parts."""
    return max((p.end for p in value.parts if p.end <= part.start), default=value.start + 1)


def _by_structure(value: ValuePosition) -> Iterator[tuple[int, int]]:
    """Ranges where no cause is known: its scalars from the last to the first, then its names, its
    end, its beginning."""
    leaves = _in_reverse(value.leaves())
    for leaf in _thinned(leaves):
        yield from _content(leaf)
    yield value.end - 1, value.end
    for part in _thinned(_in_reverse(value.parts)):
        yield part.step_start, part.end
    if not value.is_container:
        middle = (value.content_start + value.end) // 2
        yield middle, value.end
    yield value.start, value.end


def _content(value: ValuePosition) -> Iterator[tuple[int, int]]:
    """The range from the first character of its first scalar that is not forced."""
    leaf = next(value.leaves())
    yield leaf.content_start, value.end


def _equally_unsuited(failed: FailedSpan, start: int, lead: int) -> tuple[str, ...]:
    """Items, as text, that are known to be invalid in place of the one at ``start``.

    Where an item repeats one before it, all items before it; if no item satisfies ``contains``,
    all.
    """
    for error in failed.errors:
        array = failed.position.find(error.path)
        item = next((p for p in array.parts if start in (p.start, p.content_start)), None)
        if array.kind != "[" or item is None:
            continue
        if error.keyword == "uniqueItems":
            wrong = [part for part in array.parts if part.end <= item.start]
        elif error.keyword == "contains":
            wrong = [failed.position.find(path) for path in error.unsuited] or array.parts
        else:
            continue
        skip, before = start - item.start, failed.text[start - lead : start]
        texts = (before + failed.text[part.start + skip : part.end] for part in wrong)
        return tuple(dict.fromkeys(texts))
    return ()


def _likeliest_cause(error: SpanError) -> Path:
    return (*error.unsuited, *error.superfluous, error.path)[0]


def _in_reverse(values: Iterable[ValuePosition]) -> list[ValuePosition]:
    return sorted(values, key=lambda value: value.start, reverse=True)


def _thinned(values: list[ValuePosition]) -> list[ValuePosition]:
    """The first four, then at doubling distances: a long list must not use up all retries."""
    picked, distance, at = values[:4], 2, 5
    while at < len(values):
        picked.append(values[at])
        at += distance
        distance *= 2
    return picked
