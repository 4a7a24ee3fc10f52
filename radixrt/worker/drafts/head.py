"""Drafts tokens by a head of the model (:mod:`radixrt.models.eagle3`, :mod:`radixrt.models.mtp`).

The head needs the model's hidden states of every token, those of prompts included: what it has
computed for a prefix is kept with the prefix. States of prompts are taken up at the end of their
step. Those of answers wait until the head drafts, or until there are BACKLOG of them: where drafts
do not pay, the head then costs a batch of many tokens now and then, and not a row in each step.

A draft is a chain. Its first token follows from the model's state, each further one from the
head's own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.messages.steps import MAX_DRAFTED, Admit
from radixrt.worker.batch import StepInputs
from radixrt.worker.drafts.drafters import Draft, Drafter
from radixrt.worker.drafts.head_pages import HeadPages, Span
from radixrt.worker.drafts.own_tokens import AllOwnTokens, Owner, OwnTokens

BACKLOG = 64
"""States of an answer that wait at most."""

KINDS = 4
"""Kinds of evidence: how sure the head is of a draft's first token."""


@dataclass(eq=False, slots=True)
class _Followed:
    """The sequence of a slot."""

    text: list[int]
    done: int = 1
    """The first position at which the head is not computed."""
    states: list[Tensor] = field(default_factory=list)
    """The model's states behind the positions from ``done - 1`` on: pieces [n, hidden_size], or as
    the model has them, [n, state_size]."""
    count: int = 0
    """Their number."""
    owner: Owner | None = None
    """Whose tokens are drafted beside the head's vocabulary; None: nobody's."""

    @property
    def known(self) -> int:
        """Positions whose states are known."""
        return self.done - 1 + self.count

    def add(self, states: Tensor) -> None:
        self.states.append(states)
        self.count += len(states)


class HeadDrafter(Drafter):
    """Keeps the head up with the sequences, and drafts by it.

    Args:
        backlog: see BACKLOG.
    """

    def __init__(self, pages: HeadPages, backlog: int = BACKLOG) -> None:
        self._pages = pages
        self._head = pages.head
        self.name = pages.head.drafter
        self._backlog = backlog
        self._followed: dict[int, _Followed] = {}
        self._own: AllOwnTokens | None = None
        if self._head.more_rows is not None:
            self._own = AllOwnTokens(len(self._head.token_ids), self._head.more_rows)
        self._drafts: dict[int, Draft] = {}
        """Those of this step, by slot."""
        self.computed = 0
        """Draft tokens that the head has computed."""

    # ------------------------------------------------------------ following the sequences

    def follow(self, admit: Admit) -> None:
        """Take any sequence into a free slot, also one whose tokens are not drafted."""
        text = unpack_ids(admit.token_ids)
        one = self._followed[admit.slot] = _Followed(text.tolist())
        if admit.drafts is not None and self._own is not None:
            root = admit.drafts.root
            one.owner = admit.slot if root is None else root
            self._own.begin(one.owner, text)

    def _own_tokens(self, slot: int) -> OwnTokens | None:
        """The tokens of a slot that are drafted beside the head's vocabulary."""
        if self._own is None or (owner := self._followed[slot].owner) is None:
            return None
        return self._own.of(owner)

    def extend(self, slots: NDArray[np.int64], token_ids: TokenIds) -> None:
        """Note the new tokens [rows] of answers in ``slots`` [rows], which are final. Marks of
        failure are left out."""
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if token >= 0 and (one := self._followed.get(slot)) is not None:
                one.text.append(token)
                if (own := self._own_tokens(slot)) is not None:
                    own.note((token,))

    def take_states(
        self, states: Tensor, inputs: StepInputs, num_chunks: int, computed: NDArray[np.int64]
    ) -> None:
        """Take the states of a step.

        Args:
            states: [num_tokens or more, state_size], which the next step may overwrite.
            num_chunks: sequences of the step, its last ones, that compute a part of their prompts.
            computed: [max_slots] positions of each slot that are final.
        """
        ends = inputs.attention.qo_indptr_cpu.tolist()
        slots, starts = inputs.slots.tolist(), inputs.starts.tolist()
        first = len(slots) - num_chunks
        answers = states[: ends[first]].clone()
        late = []
        for slot, start, row in zip(slots[:first], starts, ends, strict=False):
            one = self._at(slot, start)
            one.add(answers[row : row + int(computed[slot]) - start])
            if one.count > self._backlog:
                late.append(slot)
        if num_chunks:
            prompts = self._head.fuse(states[ends[first] : ends[-1]])
            pieces = prompts.split(
                [b - a for a, b in zip(ends[first:], ends[first + 1 :], strict=False)]
            )
            chunks = list(zip(slots[first:], starts[first:], pieces, strict=True))
            for slot, start, piece in chunks:  # another chunk of this step may go on from there
                self._pages.keep_ends(slot, start, piece)
            for slot, start, piece in chunks:
                self._at(slot, start).add(piece)
            late += slots[first:]
        self.catch_up(late)

    def _at(self, slot: int, start: int) -> _Followed:
        """The sequence of a slot, whose next state is that behind position ``start``: those before
        are known, or are in pages that others have computed."""
        one = self._followed[slot]
        if one.known != start:
            state = self._pages.state_before(slot, start)
            one.states, one.count, one.done = [], 0, start + (state is None)
            if state is not None:
                one.add(state)
        return one

    def catch_up(self, slots: Collection[int]) -> None:
        """Compute the head at all positions of these slots whose model's KV is computed."""
        known = self._take_known([slot for slot in slots if slot in self._followed], ahead=0)
        if known is not None:
            self._pages.keep(*known)

    def _take_known(
        self, slots: Sequence[int], ahead: int
    ) -> tuple[list[Span], list[int], Tensor] | None:
        """Take the known positions of slots, and ``ahead`` further ones, at which the head is not
        computed yet: the arguments of ``HeadPages.compute``. None: there are none."""
        self._fuse(slots)
        spans, token_ids, states = [], [], []
        for slot in slots:
            one = self._followed[slot]
            end = min(one.known + ahead, len(one.text))
            if end <= one.done:
                continue
            spans.append(Span(slot, one.done, end))
            token_ids += one.text[one.done : end]
            rows = torch.cat(one.states)
            states.append(rows[: end - one.done])
            one.states, one.count = [rows[end - one.done :].clone()], one.count - (end - one.done)
            one.done = end
        return (spans, token_ids, torch.cat(states)) if spans else None

    def _fuse(self, slots: Sequence[int]) -> None:
        """Fuse the states of slots that are as the model has them."""
        width = self._head.state_size
        raw = [
            piece
            for slot in slots
            for piece in self._followed[slot].states
            if piece.shape[1] == width
        ]
        if not raw:
            return
        fused = iter(self._head.fuse(torch.cat(raw)).split([len(piece) for piece in raw]))
        for slot in slots:
            one = self._followed[slot]
            position = one.done - 1
            for index, piece in enumerate(one.states):
                if piece.shape[1] == width:
                    one.states[index] = next(fused)
                    self._pages.keep_ends(slot, position, one.states[index])
                position += len(piece)

    def release(self, slot: int) -> None:
        self._followed.pop(slot, None)
        self._drafts.pop(slot, None)
        if self._own is not None:
            self._own.release(slot)

    # ------------------------------------------------------------ drafts

    def draft(
        self,
        wanted: Mapping[int, int],
        least: float,
        longest: Sequence[int] = (MAX_DRAFTED,) * KINDS,
    ) -> None:
        """Compute the drafts of the next step.

        Args:
            wanted: slots, and the most tokens to draft for each.
            least: a draft ends where the head thinks that its next token is less likely to be
                accepted.
            longest: the most tokens of a draft by its kind; the first is drafted in any case.
        """
        self._drafts = {}
        slots = [slot for slot in wanted if self._is_ready(self._followed[slot])]
        ends = {slot: self._followed[slot].known + 1 for slot in slots}
        known = self._take_known(slots, ahead=1)
        if known is None:
            return
        if self._own is not None:
            owners = (self._followed[slot].owner for slot in slots)
            self._own.read(owner for owner in owners if owner is not None)
        hidden, states = self._pages.compute(*known)
        survival = torch.ones(len(slots))
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        while True:
            chances, likeliest = self._likeliest(slots, hidden)
            survival *= chances
            self.computed += len(slots)
            goes_on = []
            rows = zip(slots, survival.tolist(), likeliest, strict=True)
            for row, (slot, chance, token) in enumerate(rows):
                drafted = tokens[slot]
                if not drafted:
                    kind = min(int(chance * KINDS), KINDS - 1) if chance >= 0.0 else 0  # NaN
                    self._drafts[slot] = Draft(drafted, kind)
                if chance >= least or not drafted:
                    drafted.append(token)
                    most = min(wanted[slot], longest[self._drafts[slot].kind])
                    if chance >= least and len(drafted) < most:
                        goes_on.append(row)
            if not goes_on:
                return
            kept = torch.tensor(goes_on)
            slots, survival = [slots[row] for row in goes_on], survival[kept]
            spans = []
            for slot in slots:
                end = ends[slot] + len(tokens[slot])
                spans.append(Span(slot, end - 1, end))
            last = [tokens[slot][-1] for slot in slots]
            hidden, states = self._pages.compute(spans, last, states[kept])

    def _likeliest(self, slots: Sequence[int], hidden: Tensor) -> tuple[Tensor, list[int]]:
        """The likeliest next tokens behind states [slots, hidden_size], and the chances [slots] that
        the head gives to them."""
        logits = self._head.logits(hidden)
        highest, chosen = logits.max(dim=-1)
        total, token_ids = logits.logsumexp(dim=-1), self._head.token_ids[chosen].tolist()
        rows_by_own: dict[OwnTokens, list[int]] = {}
        for row, slot in enumerate(slots):
            if (own := self._own_tokens(slot)) is not None:
                rows_by_own.setdefault(own, []).append(row)
        for own, rows in rows_by_own.items():
            if (scores := own.scores(hidden[rows])) is None:
                continue
            total[rows] = torch.logaddexp(total[rows], scores.logsumexp(dim=-1))
            values, places = scores.max(dim=-1)
            for row, value, place in zip(rows, values, places.tolist(), strict=True):
                if value > highest[row]:
                    highest[row], token_ids[row] = value, own.token_ids[place]
        return (highest - total).exp(), token_ids

    @staticmethod
    def _is_ready(one: _Followed) -> bool:
        """Whether the model's next input is the text's last token, and the head is not computed
        there."""
        return len(one.text) == one.known + 1 and one.done <= one.known

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        draft = None if ahead else self._drafts.get(slot)
        return None if draft is None else Draft(draft.token_ids[:budget], draft.kind)
