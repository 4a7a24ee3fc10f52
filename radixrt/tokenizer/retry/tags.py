"""Finds the JSON contents of tags in a growing text, and the sub-values to validate in them.

Where free text is allowed, it has no trigger in it, so the first trigger begins a tag; or the
opening of a list of all tags does. A JSON content ends with its value, and any other text at the
first occurrence of the tag's end. A constraint in which that is not certain has no checks. In a
call whose parameters are written one by one, a value is JSON, or a text in the format's own way,
which has no checks; the paths of checks are those of the arguments as one object.
"""

import re

from radixrt.constrained.grammar import CheckedParameters, CheckedTags, SpanCheck
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


_OUTSIDE, _CONTENT, _END = "the beginning of a tag", "the content of a tag", "the end of a tag"
_PLAIN = "free text to the end of the answer"


class TagTracker(Scanner):
    """Scans one text with tags."""

    STATE = ("offset", "_state", "_known", "_tag", "_left", "_num_tags")

    def __init__(self, tags: CheckedTags) -> None:
        self._tags = tags
        openings = tuple(opening for opening, _ in tags.lists)
        self._begins = openings or (tags.triggers if tags.free_text else ())
        """The first of them in a text begins a tag, or the list of all tags."""
        self._must_begin_list = tags.begins_answer or bool(tags.lists and not tags.free_text)
        self._contents: list[Scanner] = [
            ParameterTracker(tag.parameters, tag.checks)
            if tag.parameters
            else SpanTracker(tag.checks)
            for tag in tags.tags
        ]
        self.restart(0)

    def restart(self, offset: int) -> None:
        self.offset, self._state, self._inside = offset, _OUTSIDE, None
        self._known = ""
        self._tag = 0
        """Index of the open tag."""
        self._left = 0
        """Characters of its end that are still to come."""
        self._num_tags = 0

    def push(self, text: str, *, ends_inside: bool = False) -> list[CompletedSpan]:
        completed: list[CompletedSpan] = []
        while text:
            before = len(text)
            if self._state is _OUTSIDE:
                text = self._outside(text)
            elif self._state is _PLAIN:
                text = ""
            elif self._state is _END:
                taken = min(self._left, len(text))
                self._left -= taken
                text = text[taken:]
            elif self._inside is not None:
                completed += self._inside.push(text, ends_inside=True)
                text = text[self._inside.offset - self.offset :]
                if self._inside.is_done:
                    self._end_value()
            else:
                text = self._any_text(text)
            self.offset += before - len(text)
            if self._state is _END and not self._left:
                self._state = _OUTSIDE
        return completed

    def finish(self) -> list[CompletedSpan]:
        completed: list[CompletedSpan] = []
        if self._inside is not None:
            completed = self._inside.finish()
            self._end_value()
        if self._state is _CONTENT or (self._state is _END and self._left):
            raise ValueError(f"the text ends inside of {self._state}")
        return completed

    # ------------------------------------------------------------ inside

    def _outside(self, text: str) -> str:
        """Take text up to the beginning of a content, or all of it; returns the rest."""
        known = self._known + text
        if self._must_begin_list and not self._num_tags:
            rest = self._without_list(known)
            if rest is not None:
                return rest
        start = self._start_of_tag(known)
        if start is None:
            keep = max(map(len, self._begins), default=1) - 1
            self._known = known[max(len(known) - keep, 0) :]
            return ""
        rest, tags = known[start:], self._tags.tags
        found = [i for i, tag in enumerate(tags) if tag.begin and rest.startswith(tag.begin)]
        if found and not any(tag.begin[: len(rest)] == rest != tag.begin for tag in tags):
            longest = max(found, key=lambda index: len(tags[index].begin))
            return self._open(longest, known, start + len(tags[longest].begin))
        if self._may_begin(rest):
            self._known = known
            return ""
        if self._tags.lists and self._num_tags:  # the end of the list
            self._state = _PLAIN
            return ""
        for index, tag in enumerate(tags):
            if not tag.begin:
                return self._open(index, known, start)
        raise ValueError(f"{rest[:20]!r} where {self._state} is due")

    def _without_list(self, known: str) -> str | None:
        """Take the beginning of an answer that is no list, or may become one; returns the rest.
        None: it is a list."""
        tags = self._tags.tags
        firsts = [opening + tag.begin for opening in self._begins for tag in tags if tag.begin]
        if any(map(known.startswith, firsts)):
            return None
        if any(first.startswith(known) for first in firsts):
            self._known = known
            return ""
        for index, tag in enumerate(tags):
            if not tag.begin:
                return self._open(index, known, 0)
        self._state, self._known = _PLAIN, ""
        return ""

    def _start_of_tag(self, known: str) -> int | None:
        """Where a tag begins in the text outside of tags; None: nowhere yet."""
        lists = self._tags.lists
        if not (self._tags.free_text or lists) or (lists and self._num_tags):
            separator = self._tags.separator if self._num_tags else ""
            return len(separator) if known.startswith(separator) else 0
        found = [(at + len(mark), at) for mark in self._begins if (at := known.find(mark)) >= 0]
        return min(found)[0 if lists else 1] if found else None

    def _may_begin(self, text: str) -> bool:
        """Whether the text may be the first part of a tag with a beginning, or of the separator."""
        alone = self._tags.free_text and not self._tags.lists
        separator = "" if alone or not self._num_tags else self._tags.separator
        begins = [separator, *(tag.begin for tag in self._tags.tags)]
        return any(begin.startswith(text) for begin in begins)

    def _open(self, tag: int, known: str, at: int) -> str:
        """Begin the content of a tag; returns the text from there on."""
        rest = known[at:]
        begin = self.offset + at - len(self._known)
        self._state, self._tag, self._known = _CONTENT, tag, ""
        self._num_tags += 1
        if self._tags.tags[tag].is_json:
            self._inside = self._contents[tag]
            self._inside.restart(begin)
        elif not self._tags.tags[tag].end:
            self._state = _PLAIN
        return rest

    def _any_text(self, text: str) -> str:
        taken = self._take_to(self._tags.tags[self._tag].end, text)
        if taken is None:
            return ""
        self._state, self._left = _END, 0
        return text[taken:]

    def _end_value(self) -> None:
        self._state, self._inside = _END, None
        self._left = len(self._tags.tags[self._tag].end)
