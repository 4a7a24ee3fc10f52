"""Finds the JSON contents of tags in a growing text, and the sub-values to validate in them.

Where free text is allowed, it has no trigger in it, so the first trigger begins a tag; or the opening of a list of all tags does. A JSON content ends with its value, and
any other text at the first occurrence of the tag's end. A constraint in which that is not certain has no checks.
"""

from typing import Any, NamedTuple

from radixrt.constrained.grammar import CheckedTags
from radixrt.tokenizer.retry.parameters import ParameterTracker
from radixrt.tokenizer.retry.spans import CompletedSpan, SpanTracker

_OUTSIDE, _CONTENT, _END = "the beginning of a tag", "the content of a tag", "the end of a tag"
_PLAIN = "free text to the end of the answer"


class Mark(NamedTuple):
    """All that a tracker knows at one moment."""

    state: str
    offset: int
    """Characters taken."""
    undecided: str
    """Outside of tags, or inside of a text: what may belong to the next mark."""
    tag: int
    """The open tag."""
    left: int
    """Characters of its end that are still to come."""
    num_tags: int
    content: Any
    """Of the content's tracker."""


class TagTracker:
    """Follows one text with tags, given in pieces that may be cut anywhere. The grammar ensures its form. The interface is that of
    :class:`radixrt.tokenizer.retry.spans.SpanTracker`."""

    def __init__(self, tags: CheckedTags) -> None:
        self._tags = tags
        openings = tuple(opening for opening, _ in tags.lists)
        self._marks = openings or (tags.triggers if tags.free_text else ())
        """The first of them in a text begins a tag, or the list of all tags."""
        self._must_begin_list = tags.begins_answer or bool(tags.lists and not tags.free_text)
        self._contents: list[Any] = [
            ParameterTracker(tag.parameters, tag.checks)
            if tag.parameters
            else SpanTracker(tag.checks)
            for tag in tags.tags
        ]
        self._fresh = [content.mark() for content in self._contents]
        self.reset(Mark(_OUTSIDE, 0, "", 0, 0, 0, None))

    @property
    def offset(self) -> int:
        """Characters taken so far."""
        return self._offset

    @property
    def open_since(self) -> int | None:
        """Where the earliest checked value that is not complete begins; None if none is open."""
        is_open = self._state is _CONTENT and self._tags.tags[self._tag].is_json
        return self._contents[self._tag].open_since if is_open else None

    def mark(self) -> Mark:
        """The tracker as it is now, for :meth:`reset`."""
        content = self._contents[self._tag].mark() if self._state is _CONTENT else None
        return Mark(
            self._state,
            self._offset,
            self._undecided,
            self._tag,
            self._left,
            self._num_tags,
            content,
        )

    def reset(self, mark: Mark) -> None:
        """Forget all text since ``mark`` was taken."""
        (
            self._state,
            self._offset,
            self._undecided,
            self._tag,
            self._left,
            self._num_tags,
            content,
        ) = mark
        if content is not None:
            self._contents[self._tag].reset(content)

    def push(self, text: str) -> list[CompletedSpan]:
        """Take the next piece; returns the checked values that end in it, inner before outer.

        Raises:
            ValueError: the text is not of the grammar.
        """
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
            elif self._tags.tags[self._tag].is_json:
                content = self._contents[self._tag]
                completed += content.push(text, ends_inside=True)
                text = text[content.offset - self._offset :]
                self._to_end(content.is_done)
            else:
                text = self._any_text(text)
            self._offset += before - len(text)
            if self._state is _END and not self._left:
                self._state = _OUTSIDE
        return completed

    def finish(self) -> list[CompletedSpan]:
        """The text is complete; returns the checked value that ends with it: a number on its own.

        Raises:
            ValueError: something is missing.
        """
        completed: list[CompletedSpan] = []
        if self._state is _CONTENT and self._tags.tags[self._tag].is_json:
            completed = self._contents[self._tag].finish()
            self._to_end(True)
        if self._state is _CONTENT or (self._state is _END and self._left):
            raise ValueError(f"the text ends inside of {self._state}")
        return completed

    # ------------------------------------------------------------ inside

    def _outside(self, text: str) -> str:
        """Take text up to the beginning of a content, or all of it; returns the rest."""
        known = self._undecided + text
        if self._must_begin_list and not self._num_tags:
            rest = self._without_list(known)
            if rest is not None:
                return rest
        start = self._start_of_tag(known)
        if start is None:
            keep = max(map(len, self._marks), default=1) - 1
            self._undecided = known[max(len(known) - keep, 0) :]
            return ""
        rest, tags = known[start:], self._tags.tags
        found = [i for i, tag in enumerate(tags) if tag.begin and rest.startswith(tag.begin)]
        if found and not any(tag.begin[: len(rest)] == rest != tag.begin for tag in tags):
            longest = max(found, key=lambda index: len(tags[index].begin))
            return self._open(longest, known, start + len(tags[longest].begin))
        if self._may_begin(rest):
            self._undecided = known
            return ""
        if self._tags.lists and self._num_tags:  # the end of the list
            self._state = _PLAIN
            return ""
        for index, tag in enumerate(tags):
            if not tag.begin:
                return self._open(index, known, start)
        raise ValueError(f"{rest[:20]!r} where {self._state} is due")

    def _without_list(self, known: str) -> str | None:
        """Take the beginning of an answer that is no list, or may become one; returns the rest. None: it is a list."""
        tags = self._tags.tags
        firsts = [opening + tag.begin for opening in self._marks for tag in tags if tag.begin]
        if any(map(known.startswith, firsts)):
            return None
        if any(first.startswith(known) for first in firsts):
            self._undecided = known
            return ""
        for index, tag in enumerate(tags):
            if not tag.begin:
                return self._open(index, known, 0)
        self._state, self._undecided = _PLAIN, ""
        return ""

    def _start_of_tag(self, known: str) -> int | None:
        """Where a tag begins in the text outside of tags; None: nowhere yet."""
        lists = self._tags.lists
        if not (self._tags.free_text or lists) or (lists and self._num_tags):
            separator = self._tags.separator if self._num_tags else ""
            return len(separator) if known.startswith(separator) else 0
        found = [(at + len(mark), at) for mark in self._marks if (at := known.find(mark)) >= 0]
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
        begin = self._offset + at - len(self._undecided)
        self._state, self._tag, self._undecided = _CONTENT, tag, ""
        self._num_tags += 1
        if not (self._tags.tags[tag].is_json or self._tags.tags[tag].end):
            self._state = _PLAIN
        self._contents[tag].reset(self._fresh[tag]._replace(offset=begin))
        return rest

    def _any_text(self, text: str) -> str:
        end = self._tags.tags[self._tag].end
        known = self._undecided + text
        at = known.find(end)
        if at < 0:
            self._undecided = known[max(len(known) - len(end) + 1, 0) :]
            return ""
        self._state, self._left, self._undecided = _END, 0, ""
        return known[at + len(end) :]

    def _to_end(self, is_done: bool) -> None:
        if is_done:
            self._state, self._left = _END, len(self._tags.tags[self._tag].end)
