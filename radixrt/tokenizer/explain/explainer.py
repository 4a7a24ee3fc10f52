"""Explains the cache misses of a request, from the scheduler's facts and the remembered prompts."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from radixrt.base.common_prefix import common_prefix_length
from radixrt.messages.cache_explanation import (
    SHOWN_TOKENS,
    CacheExplanation,
    CacheFacts,
    Cause,
    Divergence,
)
from radixrt.messages.ids import unpack_ids
from radixrt.tokenizer.explain.records import ChatLayout, PromptRecord, PromptRecords
from radixrt.tokenizer.vocabulary import Vocabulary

_WORD = re.compile(r"[\w:.+/-]+")
_PUNCTUATION = ".:/+-"

_NAMED = re.compile(
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6}",
    re.IGNORECASE,
)
"""Months and days."""

_KINDS = {
    "a UUID": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", re.IGNORECASE),
    "a date": re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"),
    "a time": re.compile(r"\d\d?:\d\d"),
    "a number": re.compile(r"[+-]?\d+(?:[.,/]\d+)*\Z"),
}
"""What a volatile word is called: the first whose pattern it begins with; else it is a hash or an
id."""


class Volatile(NamedTuple):
    """Volatile text at the place where two texts begin to differ."""

    kind: str
    word: str
    """The word in the first text."""
    agreeing: int
    """Number of characters behind it in the first text that agree with the second text, but for
    further volatile words."""
    end: int
    """The place in the first text where they end."""


def volatile_at_divergence(one: str, other: str) -> Volatile | None:
    """The volatile text in which two texts begin to differ, if they do in one.

    >>> volatile_at_divergence("It is 10:42 now. Be brief.", "It is 9:07 now. Be brief.")
    Volatile(kind='a time', word='10:42', agreeing=15, end=26)
    """
    at = common_prefix_length(one, other)
    if at in (len(one), len(other)):
        return None
    start = at
    while start > 0 and _WORD.match(one, start - 1, start):
        start -= 1
    words = [_word_at(text, start) for text in (one, other)]
    if not all(map(_is_volatile, words)):
        return None
    end = start + len(words[0])
    agreeing = _num_agreeing(one[end:], other[start + len(words[1]) :])
    word = words[0].strip(_PUNCTUATION)
    return Volatile(_kind(word), word, agreeing, end + agreeing)


def _word_at(text: str, start: int) -> str:
    found = _WORD.match(text, start)
    return found.group() if found else ""


def _is_volatile(word: str) -> bool:
    return any(map(str.isdigit, word)) or _NAMED.fullmatch(word.strip(_PUNCTUATION)) is not None


def _kind(word: str) -> str:
    if _NAMED.fullmatch(word):
        return "a date"
    found = (kind for kind, pattern in _KINDS.items() if pattern.match(word))
    return next(found, "a hash or an id")


def _num_agreeing(one: str, other: str) -> int:
    """Number of leading characters of ``one`` that agree with ``other``, volatile words apart."""
    agreeing = 0
    for (text, word), (text_there, _) in zip(_parts(one), _parts(other), strict=False):
        if text != text_there:
            return agreeing + common_prefix_length(text, text_there)
        agreeing += len(text) + len(word)
    return agreeing


def _parts(text: str) -> list[tuple[str, str]]:
    """The text, cut behind each volatile word: what is before the word, and the word."""
    parts, position = [], 0
    for match in _WORD.finditer(text):
        if _is_volatile(match.group()):
            parts.append((text[position : match.start()], match.group()))
            position = match.end()
    return [*parts, (text[position:], "")]


CONTEXT_TOKENS = 32
"""Tokens before the divergence, to recognise a date that begins before it."""

MIN_AGREEING = 16
"""Characters behind volatile text that have to agree: otherwise other text follows, and the
volatile text is no cause."""

MIN_AGREEING_TOKENS = 32
"""Tokens that must agree in the last message, which is new by nature: volatile text is a cause only
if it parts a long text from its cache."""


class Explainer:
    """Explains requests whose prompts are remembered.

    Attributes:
        records: the remembered prompts; the caller adds them.
    """

    def __init__(
        self, vocabulary: Vocabulary, page_size: int, max_bytes: int, shows_texts: bool = True
    ) -> None:
        """
        Args:
            max_bytes: memory of the remembered prompts.
            shows_texts: False: to nobody.
        """
        self.records = PromptRecords(max_bytes)
        self._vocabulary = vocabulary
        self._page_size = page_size
        self._shows_texts = shows_texts

    def explain(
        self, record: PromptRecord, facts: CacheFacts, with_texts: bool = True
    ) -> CacheExplanation:
        """
        Args:
            with_texts: the client may see texts, and facts about other salts.
        """
        cause, detail, divergence = self._cause(record, facts, with_texts and self._shows_texts)
        return CacheExplanation(
            request_id=record.request_id,
            prompt_tokens=record.num_tokens,
            cached_tokens=facts.cached_tokens,
            missed_tokens=record.num_tokens - facts.cached_tokens,
            cause=cause,
            detail=detail if facts.disk is None else f"{facts.disk.sentence} {detail}",
            divergence=divergence,
            evicted=facts.evicted if cause == "evicted" else None,
            disk=facts.disk,
        )

    def _cause(
        self, record: PromptRecord, facts: CacheFacts, with_texts: bool
    ) -> tuple[Cause, str, Divergence | None]:
        cached, reusable = facts.cached_tokens, facts.reusable_tokens
        if cached >= reusable:
            return "none", _all_reused(record, facts), None
        stateless = min(facts.stateless_tokens, reusable - cached)
        if 2 * stateless > reusable - cached:
            return "missing_state", _without_state(stateless, cached), None
        is_shared = cached > facts.seen_tokens
        """Another sequence computed more of the same prompt meanwhile."""
        if facts.seen_tokens >= reusable or (is_shared and reusable - cached < self._page_size):
            return "page_rounding", self._rounded(reusable - cached), None
        difference = _Difference(self._vocabulary, record, facts)
        cause: Cause = "never_seen"
        detail = self._new(difference)
        if not is_shared:
            cause, detail = self._cause_of(difference, facts, with_texts)
        return cause, detail, difference.divergence(with_texts, in_tools=cause == "tools_changed")

    def _cause_of(
        self, difference: "_Difference", facts: CacheFacts, with_texts: bool
    ) -> tuple[Cause, str]:
        if facts.evicted is not None:
            return "evicted", (
                f"The tokens from {facts.cached_tokens} on were in the cache and were evicted "
                f"{facts.evicted.seconds_ago:.1f} s before this request, by the rule {facts.evicted.rule}."
            )
        if facts.other_salt_tokens and with_texts:
            return "other_salt", (
                f"The first {facts.other_salt_tokens} tokens are cached under another cache_salt of the same key; prefixes are "
                "shared only within one salt."
            )
        if facts.other_adapter_tokens and with_texts:
            return "other_adapter", (
                f"The first {facts.other_adapter_tokens} tokens are cached as another adapter, or the base model, computed them."
            )
        if (number := difference.record.image_at(difference.token_index)) is not None:
            return "never_seen", (
                f"Image {number} of the prompt is not in the cache at this place: its pixels differ from those of the cached "
                "prompt, or it is new."
            )
        earlier = self.records.of_sequence(facts.seq_id)
        layout = difference.layout
        before = None if earlier is None else earlier.layout
        alike = layout.num_alike(earlier) if layout and before and earlier else 0
        has_other_tools = layout and before and layout.tools != before.tools
        if layout and before and has_other_tools and difference.is_outside_messages:
            names, names_before = ({name for name, _ in one.tools} for one in (layout, before))
            if alike or names & names_before:  # else it is another client's prompt
                return "tools_changed", _changed_tools(layout.tools, before.tools)
        if (detail := difference.volatile_text(with_texts)) is not None:
            return "volatile_text", detail
        if 0 <= difference.message < alike and not has_other_tools:
            return "template_rewrote_history", difference.rewritten()
        return "never_seen", self._new(difference)

    def _rounded(self, num_tokens: int) -> str:
        return (
            f"The cache keeps whole pages of {self._page_size} tokens; {num_tokens} tokens that it has seen before are in the "
            "incomplete page at the end."
        )

    def _new(self, difference: "_Difference") -> str:
        index, record = difference.token_index, difference.record
        text = f"The last {record.num_tokens - index} tokens are new: no cached prompt or answer continues with them."
        if record.num_tokens <= self._page_size:
            text += f" A prompt of at most {self._page_size} tokens fills no page, so none of it is kept."
        return text


class _Difference:
    """A prompt and the nearest cached sequence, at the place where they part."""

    def __init__(self, vocabulary: Vocabulary, record: PromptRecord, facts: CacheFacts) -> None:
        self.record, self.layout = record, record.layout
        self._decode = vocabulary.decode
        self.token_index = index = max(facts.seen_tokens, facts.cached_tokens)
        context = record.ids(index - CONTEXT_TOKENS, index)
        self._own_ids = record.ids(index, index + SHOWN_TOKENS)
        cached_ids = unpack_ids(facts.cached_ids).tolist() if index == facts.seen_tokens else []
        self._may_show = facts.is_own or not cached_ids
        before = self._decode(context)
        self._own, self._cached = (
            self._decode(context + ids) for ids in (self._own_ids, cached_ids)
        )
        self._starts = [common_prefix_length(before, text) for text in (self._own, self._cached)]
        self._at = common_prefix_length(self._own, self._cached)
        """The first character that differs, in both texts."""
        self.message = -1 if self.layout is None else self._message(self.layout)

    def _message(self, layout: ChatLayout) -> int:
        """The message in which the texts begin to differ."""
        self._position = (
            layout.position(self.token_index, self._length) + self._at - self._starts[0]
        )
        return layout.message_at(self._position)

    def _length(self, start: int, end: int) -> int:
        return len(self._decode(self.record.ids(start, end)))

    @property
    def is_outside_messages(self) -> bool:
        """Whether the place is in text of the template, before the content of a message."""
        assert self.layout is not None
        return not self.layout.spans or self._position < self.layout.spans[self.message][0]

    @property
    def _is_in_last_message(self) -> bool:
        return self.layout is None or self.message == len(self.layout.spans) - 1

    def volatile_text(self, with_texts: bool) -> str | None:
        """The sentence about volatile text at this place, if it is a cause."""
        found = volatile_at_divergence(self._own, self._cached)
        if found is None:
            return None
        own_text = self._own[self._starts[0] :]
        tokens = found.agreeing * len(self._own_ids) / max(1, len(own_text))
        least = MIN_AGREEING_TOKENS if self._is_in_last_message else 0
        if found.agreeing < MIN_AGREEING or tokens < least:
            return None
        word = f" ({_shortened(found.word)})" if with_texts else ""
        return (
            f"Only {found.kind}{word} differs from the cached prompt here, and the same text follows it. Put it behind the text that "
            "stays the same, or leave it out."
        )

    def rewritten(self) -> str:
        where = f"Message {self.message} was sent as before"
        if self._own[self._starts[0] :] == self._cached[self._starts[1] :]:
            return f"{where} and has the same text, but it is encoded in other tokens than those that the model generated."
        return (
            f"{where}, but the chat template writes it in another way than when it was cached (it may drop the reasoning of earlier "
            "answers, or write calls of tools anew). replay_reasoning repeats earlier answers as they were generated."
        )

    def divergence(self, shows_texts: bool, in_tools: bool) -> Divergence:
        has_message = self.message >= 0 and not in_tools
        assert self.layout is not None or not has_message
        return Divergence(
            token_index=self.token_index,
            message_index=self.message if has_message else None,
            role=self.layout.roles[self.message] if self.layout and has_message else None,
            prompt_text=self._own[self._starts[0] :] if shows_texts else None,
            cached_text=self._cached[self._starts[1] :] if shows_texts and self._may_show else None,
        )


def _all_reused(record: PromptRecord, facts: CacheFacts) -> str:
    rest = record.num_tokens - facts.cached_tokens
    if rest <= 1:
        return "All tokens but the last came from the cache; the last is always computed, because its logits give the answer."
    return f"{rest} tokens had to be computed in any case: log-probabilities of the prompt were asked for, or the cache is off."


def _without_state(num_tokens: int, cached: int) -> str:
    return (
        f"{num_tokens} tokens were in the cache, but the nearest state of the recurrent layers was kept behind token {cached}, so they "
        "were computed again. A state is kept at their end now: the next prompt that begins with them finds it."
    )


def _changed_tools(mine: Sequence[tuple[str, int]], theirs: Sequence[tuple[str, int]]) -> str:
    if sorted(mine) == sorted(theirs):
        return "The same tools came in another order than in the cached prompt; send them in one order."
    pairs = enumerate(zip(mine, theirs, strict=False))
    index = next((i for i, (one, other) in pairs if one != other), min(len(mine), len(theirs)))
    if index < len(mine):
        return f"The tools differ from those of the cached prompt from tool {index} ({_shortened(mine[index][0])}) on."
    return f"The cached prompt had {len(theirs)} tools, this one has the first {len(mine)} of them."


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
