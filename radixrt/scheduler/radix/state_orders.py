"""Orders which states of recurrent layers a step keeps, of prompts and of answers, and drops an
answer's older ones."""

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.steps import KeepState
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable

ANSWER_STRIDE = 16
"""Tokens of an answer, at least, from state to state: each is a copy."""

MAX_TAKEN_BACK = 256
"""Tokens by which an answer may be taken back to a state of its own, where a value is checked and
found wrong."""


class StateOrders:
    """The orders to keep states that go with the plan of a step."""

    def __init__(self, limits: SchedulerLimits, slots: SlotTable, states: KeptStates) -> None:
        self._slots = slots
        self._states = states
        self._page_size = limits.page_size
        self._interval = limits.state_interval
        self._stride = -(-ANSWER_STRIDE // limits.page_size) * limits.page_size
        self._share = limits.shares_prefixes

    def of_prompt(self, sequence: Sequence, start: int, end: int) -> list[KeepState]:
        """The states to keep of a chunk that computes the positions from ``start`` to ``end``: at
        every interval, where the prompt leaves what the tree has, at its cache breakpoints, at the
        end of its messages, at its own end, and at the end of the chunk, where another sequence
        may go on."""
        if not self._states or not self._share or not sequence.reads_cache:
            return []
        size, step = self._page_size, self._interval
        wanted = {*range(-(-(start + 1) // step) * step, end + 1, step), sequence.branch}
        retained = sequence.options.cache_hints.retain
        ends = [sequence.messages_end, sequence.num_tokens - 1, end]
        ends += [kept.num_tokens for kept in retained if kept.num_tokens and kept.level != "none"]
        wanted |= {one // size * size for one in ends}
        orders = []
        for position in sorted(wanted):
            if start < position <= end and not position % size:
                orders += self._keep(sequence, position)
        return orders

    def of_answers(self, decoding: NDArray[np.intp]) -> list[KeepState]:
        """Order the next state of an answer, for each of these slots that has passed the one
        ordered before and has a page there."""
        if not self._states:
            return []
        slots, stride = self._slots, self._stride
        planned = slots.planned[decoding]
        positions = -(-planned // stride) * stride
        has_page = positions <= slots.num_pages[decoding] * self._page_size
        due = (planned > slots.next_state[decoding]) & has_page
        orders = []
        for slot, position in zip(decoding[due].tolist(), positions[due].tolist(), strict=True):
            sequence = slots.sequences[slot]
            if not self._share or position > slots.last_position[slot]:
                continue
            slots.next_state[slot] = position
            if new := self._keep(sequence, position, is_certain=False):
                self._drop_old(sequence)
                page = int(slots.block_tables[slot, position // self._page_size - 1])
                sequence.answer_states.append((position, page))
                orders += new
        return orders

    def _drop_old(self, sequence: Sequence) -> None:
        """Drop the states of an answer that the worker has missed, and those before the newest that
        may be read, except at intervals and where the answer may be taken back to.

        A state goes when the answer is twice as far beyond it as the largest power of two of
        strides that divides its position. So an answer that is taken back by some tokens has a
        state at most as many tokens, or a stride, further back.
        """
        stride = self._stride
        reach = stride if sequence.grammar is None else MAX_TAKEN_BACK
        stay: list[tuple[int, int]] = []
        newest: int | None = None
        for position, page in reversed(sequence.answer_states):
            strides = position // stride
            if not self._states.is_kept[page]:
                if position >= sequence.num_tokens:
                    stay.append((position, page))  # a step in flight may write it
                else:
                    self._states.drop_of(page)
                continue
            newest = newest or position
            if newest - position <= min(reach, 2 * stride * (strides & -strides)):
                stay.append((position, page))
            elif position % self._interval:
                self._states.drop_of(page)
        sequence.answer_states = stay[::-1]

    def _keep(
        self, sequence: Sequence, position: int, *, is_certain: bool = True
    ) -> list[KeepState]:
        """The order to keep the state behind a position, at the end of a page of a sequence; none
        if it is kept already or no row is to be had."""
        page = int(self._slots.block_tables[sequence.slot, position // self._page_size - 1])
        if self._states.has(page):
            return []
        row = self._states.keep(page, position - sequence.kept_to, is_certain=is_certain)
        if row is None:
            return []
        sequence.kept_to = position
        return [KeepState(sequence.slot, position, row)]
