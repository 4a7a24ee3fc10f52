"""Drafts tokens for the slots of a step: asks the drafters, and compares chances with the price.

A further drafter is a class with :meth:`radixrt.worker.drafts.drafters.Drafter.propose`, an entry
of :meth:`Speculator.__init__` and a name in ``DRAFTERS``. The drafts of a head cost time before they
are known, so the others are asked first: :meth:`Speculator.length_for_head`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.messages.steps import DRAFTERS, MAX_DRAFTED, Admit, VerifiedDraft
from radixrt.worker.drafts.drafters import (
    Drafter,
    GrammarDrafter,
    NgramDrafter,
    PoolDrafter,
    ReferenceDrafter,
)
from radixrt.worker.drafts.head import KINDS, HeadDrafter
from radixrt.worker.drafts.price import Chance, Chances, Source

ANY_KIND = -1
"""Stands for all kinds of a head's drafts, before one is computed."""

EXPECTED = ("grammar", "tree", "prediction")
"""Drafters whose texts the answers are expected to follow."""

MAX_STRETCHES = 4
"""Stretches of a draft. Each takes some 10 µs to find."""

REST_AFTER_DEFERRAL = 16
"""Steps without drafts after a step in which the mask of a slot was not ready: each draft needs a
further mask."""


@dataclass(eq=False, slots=True)
class _Speculating:
    """A sequence whose tokens are drafted."""

    text: list[int]
    end: int
    """Length of the text at which the answer ends."""
    ends: frozenset[int]
    """Tokens that end the answer. They are not drafted: nothing can follow them."""
    rest: int = 0
    """Steps to come without drafts."""
    drafted: list["_Stretch"] = field(default_factory=list)
    """The last draft."""
    instead: list["_Stretch"] = field(default_factory=list)
    """The draft of the others, where the head was asked."""
    judged_from: int = 0
    """Length of the text when it was judged last."""

    @property
    def has_ended(self) -> bool:
        """Whether the last token ends the answer, which the scheduler has not seen yet."""
        return self.text[-1] in self.ends


class _Stretch(NamedTuple):
    """Consecutive tokens of a draft that one drafter has proposed."""

    source: Source
    token_ids: list[int]
    """As proposed."""
    num_tokens: int
    """Leading tokens that pay."""
    chance: Chance


_NOTHING = _Stretch((0, 0), [], 0, Chance(0.0, 0.0))


def _saved(draft: Sequence[_Stretch], price: float) -> float:
    """Tokens of a draft that are expected to be accepted, less the price of its rows."""
    saved, survival = 0.0, 1.0
    for chance, count in ((one.chance, one.num_tokens) for one in draft if one.num_tokens):
        saved += survival * chance.expected_accepted(count) - price * count
        survival *= chance.survival(count)
    return saved


class Speculator:
    """Owns the drafters and the texts of the slots.

    Args:
        forced: the tokens that the grammar of a slot forces and that are not jumped over.
        allowed: of a slot's draft, the leading tokens that its grammar allows.
        head: None: the model has none.
        from_text: False: only the head drafts.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        forced: Callable[[int], list[int]],
        allowed: Callable[[int, list[int]], list[int]],
        head: HeadDrafter | None = None,
        *,
        from_text: bool = True,
    ) -> None:
        by_name: dict[str, Drafter] = {
            "grammar": GrammarDrafter(forced),
            "tree": ReferenceDrafter(lambda sources: sources.continuation),
            "ngram": NgramDrafter(),
            "pool": PoolDrafter(),
            "prediction": ReferenceDrafter(lambda sources: sources.prediction, begins_answer=True),
        }
        if not from_text:
            by_name = {}
        if head is not None:
            by_name[head.name] = head
        self._head = -1 if head is None else DRAFTERS.index(head.name)
        self._drafters = [
            (index, by_name[name]) for index, name in enumerate(DRAFTERS) if name in by_name
        ]
        self._without_head = [one for one in self._drafters if one[1] is not head]
        self._chances = Chances([DRAFTERS.index(name) for name in EXPECTED])
        self._eos_token_ids = eos_token_ids
        self._allowed = allowed
        self._slots: dict[int, _Speculating] = {}

    def admit(self, admit: Admit) -> None:
        """Take a sequence into a free slot, if its tokens are drafted."""
        if admit.drafts is None:
            return
        slot, sampling = admit.slot, admit.sampling
        text = unpack_ids(admit.token_ids).tolist()
        num_prompt = len(text) - admit.num_output
        ends = () if sampling.ignore_eos else self._eos_token_ids
        assert sampling.max_tokens is not None
        self._slots[slot] = _Speculating(
            text, num_prompt + sampling.max_tokens, frozenset((*ends, *sampling.stop_token_ids))
        )
        for _, drafter in self._drafters:
            drafter.admit(slot, text, num_prompt, admit.drafts)

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot, if there is one."""
        if self._slots.pop(slot, None) is not None:
            for _, drafter in self._drafters:
                drafter.release(slot)

    def slots_of(self, slots: NDArray[np.int64]) -> list[int]:
        """The ones of ``slots`` [n] whose tokens are drafted."""
        return [slot for slot in slots.tolist() if slot in self._slots] if self._slots else []

    def last_token(self, slot: int) -> int:
        return self._slots[slot].text[-1]

    def extend(self, slots: NDArray[np.int64], token_ids: TokenIds) -> None:
        """Note the new tokens [rows] of answers in ``slots`` [rows], which are final. Marks of
        failure are left out."""
        if self._slots:
            for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if token >= 0 and (one := self._slots.get(slot)) is not None:
                    one.text.append(token)

    def defer(self, slots: Sequence[int]) -> None:
        """Note slots whose masks were not ready."""
        for slot in slots:
            if (one := self._slots.get(slot)) is not None:
                one.rest = REST_AFTER_DEFERRAL

    def length_for_head(self, slot: int, room: int, price: float, cost: float) -> int:
        """The number of tokens that the head is to draft for a slot; 0: it would save nothing
        beyond what the other drafters promise.

        Args:
            price: of a row.
            cost: of a token that the head drafts, also in times of an output token.
        """
        one = self._slots.get(slot)
        if one is None or one.rest or (budget := self._budget(one, room)) <= 0:
            return 0
        self._judge(one)
        chance = self._chances.estimate((self._head, ANY_KIND))
        length = chance.paying_length(price + cost, budget)
        # Behind the last token that pays, the head computes one that does not.
        gain = chance.expected_accepted(length) - price * length - cost * (length + 1)
        if gain <= 0:
            return 0
        others = self._stretches(slot, budget, price, self._without_head)
        if gain <= _saved(others, price):
            return 0
        one.instead = others
        return length

    def longest_by_head(self, price: float) -> list[int]:
        """The most tokens that pay of a draft of the head, by the kind of its first.

        Args:
            price: of a row and of the head's token.
        """
        chances = [self._chances.estimate((self._head, kind)) for kind in range(KINDS)]
        return [chance.paying_length(price, MAX_DRAFTED) for chance in chances]

    @staticmethod
    def _budget(one: _Speculating, room: int) -> int:
        """Most draft tokens of the next step."""
        if one.has_ended:
            return 0
        # One token less than the answer may have: the last is drawn, not drafted.
        return min(room, MAX_DRAFTED, one.end - len(one.text) - 1)

    def propose(self, slot: int, room: int, price: float) -> list[int]:
        """The draft of a slot for the next step; often none.

        Args:
            price: of a row, see ``StepPlan.draft_price``.
        """
        one = self._slots.get(slot)
        if one is None or one.has_ended:
            return []
        self._judge(one)
        if one.rest:
            one.rest -= 1
            return []
        budget = self._budget(one, room)
        if budget <= 0:
            return []
        tokens = self._draft(slot, budget, price, one)
        if not tokens:
            return []
        tokens = tokens[: next((i for i, t in enumerate(tokens) if t in one.ends), len(tokens))]
        return self._allowed(slot, tokens) if tokens else tokens

    def _draft(self, slot: int, budget: int, price: float, one: _Speculating) -> list[int]:
        one.drafted = self._stretches(slot, budget, price, self._drafters)
        if one.drafted[:1] == one.instead[:1]:
            one.instead = []
        return [token for each in one.drafted for token in each.token_ids[: each.num_tokens]]

    def _stretches(
        self, slot: int, budget: int, price: float, drafters: Sequence[tuple[int, Drafter]]
    ) -> list[_Stretch]:
        """Stretches of one drafter after the other, while their tokens pay. Of the last, some may
        not."""
        found: list[_Stretch] = []
        tokens: list[int] = []
        survival = 1.0
        while len(tokens) < budget and len(found) < MAX_STRETCHES:
            stretch = self._best(slot, budget - len(tokens), price / survival, tokens, drafters)
            if not stretch.token_ids:
                break
            found.append(stretch)
            tokens += stretch.token_ids[: stretch.num_tokens]
            if stretch.num_tokens < len(stretch.token_ids):
                break
            survival *= stretch.chance.survival(stretch.num_tokens)
        return found

    def _judge(self, one: _Speculating) -> None:
        """Learn from what the answer has in place of the last draft, also of the tokens of it that
        did not pay, and of the draft of others in whose place the head was asked."""
        if one.judged_from == len(one.text):
            return
        for stretches in (one.drafted, one.instead):
            new = one.text[one.judged_from :]
            for stretch in stretches:
                num_tried = min(len(stretch.token_ids), len(new))
                if not num_tried:
                    break
                num_right = next(
                    (i for i in range(num_tried) if stretch.token_ids[i] != new[i]), num_tried
                )
                self._chances.learn(stretch.source, num_tried, num_right)
                if stretch.source[0] == self._head:
                    self._chances.learn((self._head, ANY_KIND), num_tried, num_right)
                if num_right < stretch.num_tokens:
                    break
                new = new[stretch.num_tokens :]
        one.drafted, one.instead = [], []
        one.judged_from = len(one.text)

    def _best(
        self,
        slot: int,
        budget: int,
        price: float,
        ahead: list[int],
        drafters: Sequence[tuple[int, Drafter]],
    ) -> _Stretch:
        """The draft with the most tokens to be accepted, and the part of it that pays."""
        best, most = _NOTHING, -1.0
        for index, drafter in drafters:
            draft = drafter.propose(slot, budget, ahead)
            if draft is None:
                continue
            source = index, draft.kind
            chance = self._chances.estimate(source)
            length = chance.paying_length(price, len(draft.token_ids))
            accepted = chance.expected_accepted(length)
            if accepted > most:
                best, most = _Stretch(source, draft.token_ids, length, chance), accepted
        return best

    def verified(self, slot: int, num_drafted: int, num_accepted: int) -> list[VerifiedDraft]:
        """The entries of the step's result for the last draft of a slot."""
        entries = []
        for stretch in self._slots[slot].drafted:
            num_tokens = min(stretch.num_tokens, num_drafted)
            if not num_tokens:
                break
            accepted = min(num_accepted, num_tokens)
            entries.append(VerifiedDraft(slot, stretch.source[0], num_tokens, accepted))
            num_drafted -= num_tokens
            num_accepted -= accepted
        return entries
