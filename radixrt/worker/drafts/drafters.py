"""Drafters are sources of tokens that may come next: grammars, expected texts, the sequence itself,
and the last answers under its cache root."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import PackedIds, unpack_ids
from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.suffix_index import SEPARATOR, SuffixIndex, ending_of

MAX_ROOTS = 32
"""Cache roots of which pools and exits are kept: those used last. All pools together take at most
some 55 MB. None is shared by two roots, because what is drafted can be learned from the time of an
answer (arXiv 2411.01076 extracts the contents of shared stores)."""

Root = TypeVar("Root")
Learned = TypeVar("Learned")


def keep_last(by_root: OrderedDict[Root, Learned], root: Root, learned: Learned) -> None:
    """Keep what was learned under a root, as the one used last."""
    by_root[root] = learned
    by_root.move_to_end(root)
    if len(by_root) > MAX_ROOTS:
        by_root.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next. They are verified in one step; those that are not drawn leave no
    trace."""

    token_ids: list[int]
    kind: int = 0
    """A small number for the kind of evidence. The chance of acceptance is learned for each drafter
    and kind."""


class Drafter:
    """One source of drafts. Every rank has the same, so a draft depends on tokens alone and on no
    clock."""

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        """Take a sequence into a free slot.

        Args:
            text: its tokens, prompt and answer; it grows while the sequence runs.
            num_prompt: of these, the tokens of the prompt.
        """

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        """Up to ``budget`` tokens to follow the slot's text; None: there is no guess.

        Args:
            ahead: draft tokens that stand between the text and these. A drafter that can't go on
                behind a draft gives None.
        """
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot. Its text is complete."""


class GrammarDrafter(Drafter):
    """Drafts the tokens that a grammar forces, where they may not be taken without being sampled.

    Where they may, jump-forward takes them (:mod:`radixrt.worker.sampling.matchers`): a forced
    token needs no verification, and its row needs no logits. With log-probabilities, or lists of
    allowed tokens, it must be sampled all the same.

    Args:
        forced: the tokens that must follow in a slot and can not be jumped over.
    """

    def __init__(self, forced: Callable[[int], list[int]]) -> None:
        self._forced = forced

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        tokens = [] if ahead else self._forced(slot)
        return Draft(tokens[:budget]) if tokens else None


_MAX_KIND = 3
"""Four tokens that agree and more are one kind of evidence."""


class ReferenceDrafter(Drafter):
    """One reference a slot.

    Args:
        pick: the packed reference of a sequence.
        begins_answer: the reference begins where the answer does, and not behind the tokens known
            at admission.
    """

    def __init__(
        self, pick: Callable[[DraftSources], PackedIds], *, begins_answer: bool = False
    ) -> None:
        self._pick = pick
        self._begins_answer = begins_answer
        self._followed: dict[int, _Followed] = {}

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        if reference := self._pick(sources):
            seen = num_prompt if self._begins_answer else len(text)
            self._followed[slot] = _Followed(unpack_ids(reference).tolist(), text, seen)

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        followed = self._followed.get(slot)
        return None if followed is None else followed.propose(budget, ahead)

    def release(self, slot: int) -> None:
        self._followed.pop(slot, None)


class _Followed:
    """A reference, and how far a text has followed it."""

    def __init__(self, reference: list[int], text: list[int], seen: int) -> None:
        self._index = SuffixIndex(reference)
        self._text = text
        self._seen = seen
        """Tokens of the text that were looked at."""
        self._place: int | None = 0
        """Place of the reference's token that is expected next; None: the text has departed."""
        self._agreed = 0
        """Tokens by which the text has followed since it departed last."""

    def propose(self, budget: int, ahead: Sequence[int]) -> Draft | None:
        self._follow()
        if self._place is None:
            self._look_up()
        if self._place is None:
            return None
        reference, start = self._index.text, self._place + len(ahead)
        if ahead and reference[self._place : start] != ahead:
            return None
        draft = reference[start : start + budget]
        return Draft(draft, min(self._agreed.bit_length(), _MAX_KIND)) if draft else None

    def _follow(self) -> None:
        text, reference = self._text, self._index.text
        while self._seen < len(text) and self._place is not None:
            if self._place < len(reference) and text[self._seen] == reference[self._place]:
                self._place += 1
                self._agreed += 1
            else:
                self._place = None
            self._seen += 1
        self._seen = len(text)

    def _look_up(self) -> None:
        match = self._index.find(self._text)
        if match is not None and match.length > 1:
            self._place, self._agreed = match.place, match.length


MAX_EXITS = 256
"""Tokens whose exits are remembered under a root: those met last."""

MIN_TRUST, MAX_TRUST = 2, 4
"""Between these, an exit is drafted."""


@dataclass(slots=True)
class CopyExit:
    """The token that comes in place of another where a copy ends."""

    token: int
    trust: int = 1
    """More after each time that it came, less after each time that another did."""


class CopyExits:
    """The exits under one cache root."""

    def __init__(self) -> None:
        self.by_token: OrderedDict[int, CopyExit] = OrderedDict()
        """The exits by the token of the source."""

    def first_in(self, token_ids: list[int]) -> int | None:
        """The place of the first of these tokens at which a copy is expected to end; None: there is
        none."""
        for place, token in enumerate(token_ids):
            if (found := self.by_token.get(token)) is not None and found.trust >= MIN_TRUST:
                return place
        return None

    def observe(self, expected: int, token: int, *, copies: bool) -> None:
        """Note the token that came where the source has another one, or the same.

        Args:
            copies: the tokens before agreed with the source, and not by chance.
        """
        known = self.by_token.get(expected)
        if known is None:
            if copies and token != expected:
                self.by_token[expected] = CopyExit(token)
                if len(self.by_token) > MAX_EXITS:
                    self.by_token.popitem(last=False)
        elif known.token == token:
            known.trust = min(known.trust + 1, MAX_TRUST)
            self.by_token.move_to_end(expected)
        elif known.trust > 1:
            known.trust -= 1
        elif token == expected:
            del self.by_token[expected]
        else:
            known.token = token


MAX_INDEXED = 32768
"""Tokens of a prompt that are indexed: its last ones. That takes about 12 ms, and the other
sequences wait."""

_KIND_OF_EXITS = 16
"""The first kind of evidence of an exit, above the kinds of matches."""


class NgramDrafter(Drafter):
    """One index a slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Copying] = {}
        self._exits: OrderedDict[CacheRoot, CopyExits] = OrderedDict()

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        index = SuffixIndex(text, max(0, len(text) - MAX_INDEXED))
        index.catch_up()
        exits = CopyExits()
        if sources.root is not None:
            exits = self._exits.get(sources.root, exits)
            keep_last(self._exits, sources.root, exits)
        self._slots[slot] = _Copying(index, exits)

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        return self._slots[slot].propose(budget, ahead)

    def release(self, slot: int) -> None:
        if (one := self._slots.pop(slot, None)) is not None:
            one.look_back()


class _Copying:
    """A text that copies its own beginning."""

    def __init__(self, index: SuffixIndex, exits: CopyExits) -> None:
        self._index = index
        self._exits = exits
        self._expected: list[int] = []
        """Tokens that followed the last match."""
        self._seen = 0
        """Length of the text at that time."""
        self._agreed = 0
        """Tokens of that match."""

    def propose(self, budget: int, ahead: Sequence[int]) -> Draft | None:
        text = self._index.text
        if not ahead:
            self.look_back()
        match = self._index.find(ending_of(text, ahead))
        if match is None:
            return None
        draft = text[match.place : match.place + budget]
        if not ahead:
            self._expected, self._seen, self._agreed = draft, len(text), match.length
        end = self._exits.first_in(draft)
        if end == 0:
            instead = self._exits.by_token[draft[0]]
            return Draft([instead.token], _KIND_OF_EXITS + instead.trust)
        if end is not None:
            return Draft(draft[:end], match.kind)
        while len(draft) < budget and not ahead:
            # the text repeats itself to its end, so the draft goes on with itself
            draft += draft[: budget - len(draft)]
        return Draft(draft, match.kind)

    def look_back(self) -> None:
        """Learn from the tokens that have come since the last match."""
        text = self._index.text
        for place, expected in enumerate(self._expected[: len(text) - self._seen]):
            token = text[self._seen + place]
            self._exits.observe(expected, token, copies=self._agreed + place > 1)
            if token != expected:
                break
        self._expected = []


MAX_POOL_TOKENS = 8192
"""Tokens of the answers of one root; of more, the older half is dropped."""

_CONTEXT = 2
"""Tokens before an answer that are kept with it, so that its beginning can be found."""


class PoolDrafter(Drafter):
    """One pool a root."""

    def __init__(self) -> None:
        self._pools: OrderedDict[CacheRoot, SuffixIndex] = OrderedDict()
        self._slots: dict[int, tuple[CacheRoot, list[int], int]] = {}
        """Root, text, and tokens of the prompt."""

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        if sources.root is not None:
            self._slots[slot] = sources.root, text, num_prompt

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        if slot not in self._slots:
            return None
        root, text, _ = self._slots[slot]
        pool = self._pools.get(root)
        if pool is None or (match := pool.find(ending_of(text, ahead))) is None:
            return None
        draft = pool.text[match.place : match.place + budget]
        if SEPARATOR in draft:
            del draft[draft.index(SEPARATOR) :]
        return Draft(draft, match.kind) if draft else None

    def release(self, slot: int) -> None:
        """Add the answer of a slot to its pool."""
        root, text, num_prompt = self._slots.pop(slot, (BASE_ROOT, [], 0))
        if len(text) <= num_prompt:
            return
        new = text[max(0, num_prompt - _CONTEXT) :][-MAX_POOL_TOKENS // 2 :]
        pool = self._pools.get(root) or SuffixIndex([])
        kept = pool.text
        if len(kept) + len(new) >= MAX_POOL_TOKENS:
            kept = (
                kept[-MAX_POOL_TOKENS // 2 + len(new) :] if len(new) < MAX_POOL_TOKENS // 2 else []
            )
            pool = SuffixIndex(kept)
        kept += [SEPARATOR, *new]
        keep_last(self._pools, root, pool)
