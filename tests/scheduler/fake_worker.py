"""A worker without a model: its KV cache is a dictionary and its next token a hash of the whole
prefix.

What it stores for a position is a digest of the sequence up to there, so a wrong page, a wrong
order or a page that was overwritten too early shows at once, in the row that reads it.
"""

from array import array
from dataclasses import dataclass, field
from itertools import groupby

from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.steps import (
    DRAFTERS,
    SAME_STATE,
    KeepState,
    SlotVector,
    StepPlan,
    StepResult,
    VerifiedDraft,
)

VOCAB = 50


def digest(previous: int, token: int) -> int:
    """Of integers alone: strings hash differently in every process, and the answers would with
    them."""
    return hash((previous, token, 0x9E3779B9))


def next_token(prefix_digest: int) -> int:
    return prefix_digest % VOCAB


def expected_answer(
    prompt: list[int], max_tokens: int, stop_tokens: frozenset[int], min_tokens: int = 0
) -> list[int]:
    """What an undisturbed model would answer."""
    state = 0
    for token in prompt:
        state = digest(state, token)
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(next_token(state))
        if answer[-1] in stop_tokens and len(answer) > min_tokens:
            break
        state = digest(state, answer[-1])
    return answer


def numbers_of(prefix_digest: int) -> list[float]:
    """The numbers of a prompt that asks for some."""
    return [prefix_digest % 97 / 97, prefix_digest % 89 / 89]


def num_forced(prefix_digest: int) -> int:
    """How many tokens a grammar forces after the one just sampled: often none, sometimes many."""
    return (prefix_digest // 5) % 13 if prefix_digest % 5 < 2 else 0


def num_deferred(prefix_digest: int) -> int:
    """Steps in which the mask of a constrained token is not ready: often none."""
    return (prefix_digest // 7) % 4 if prefix_digest % 7 < 2 else 0


def drafted(prefix_digest: int, most: int) -> list[int]:
    """A draft behind a prefix: often none, often wrong from some token on."""
    count = min((prefix_digest // 11) % 9, most)
    right = (prefix_digest // 99) % (count + 1)
    draft, value = [], prefix_digest
    for place in range(count):
        token = next_token(value)
        draft.append(token if place < right else (token + 1) % VOCAB)
        value = digest(value, draft[-1])
    return draft


@dataclass
class _Slot:
    tokens: list[int]
    num_known: int
    computed: int
    pages: list[int]
    constrained: bool
    """Forces the tokens that the model would have chosen anyway, so the expected answer is the
    same."""
    pooled: bool = False
    """Gives numbers in place of a token, here two of the digest."""
    end: int = 0
    """Length at which the answer ends, if it is drafted; 0: it is not."""
    deferred: int = 0
    """Steps until its mask is ready."""
    state: int = 0
    """The state of its recurrent layers: the digest of what it has computed."""
    keep: list[KeepState] = field(default_factory=list)
    released: bool = False
    """Kept only for the token that it waits for."""


class FakeWorker:
    """Executes step plans as the real worker does."""

    def __init__(self, page_size: int, *, has_states: bool = False) -> None:
        """
        Args:
            has_states: the model has recurrent layers.
        """
        self.page_size = page_size
        self.has_states = has_states
        self.kept: dict[int, int] = {}
        """The kept states."""
        self.written: list[int] = []
        """Those of the last step."""
        self.states_written = 0
        """Of all steps."""
        self.memory: dict[tuple[int, int], int] = {}
        self.slots: dict[int, _Slot] = {}
        self.computed_tokens = 0
        self.num_deferred = 0
        self.num_accepted = 0
        self.seconds_per_token = 0.0

    def step(self, plan: StepPlan) -> StepResult:
        for slot in plan.release:
            assert not self.slots[slot].released, "released twice"
            if self.slots[slot].deferred:
                self.slots[slot].released = True
            else:
                del self.slots[slot]
        waiting = [slot for slot, state in self.slots.items() if state.deferred]
        decoding = [
            slot
            for slot, state in self.slots.items()
            if state.computed >= state.num_known and not (state.deferred or state.pooled)
        ]
        self.jumps: dict[int, int] = {}
        self.drafts: dict[int, list[int]] = {}
        self.verified: list[VerifiedDraft] = []
        for admit in plan.admit:
            if admit.slot in self.slots:
                assert self.slots[admit.slot].released, "admitted into a slot that is taken"
                waiting.remove(admit.slot)
            tokens = unpack_ids(admit.token_ids).tolist()
            pages = unpack_ids(admit.pages).tolist()
            self.slots[admit.slot] = _Slot(
                tokens,
                len(tokens),
                admit.num_cached,
                pages,
                constrained=admit.grammar is not None,
                pooled=admit.pool is not None,
            )
            if admit.state >= 0:
                self.slots[admit.slot].state = self.kept[admit.state]
            if admit.drafts is not None:
                most = admit.sampling.max_tokens or 0
                self.slots[admit.slot].end = len(tokens) - admit.num_output + most
        for table in plan.block_tables:
            self.slots[table.slot].pages = unpack_ids(table.pages).tolist()
            if table.state != SAME_STATE:
                self.slots[table.slot].state = self.kept[table.state]
        for keep in plan.keep:
            self.slots[keep.slot].keep.append(keep)
        extended = [slot for slot, _ in groupby(unpack_ids(plan.extend_slots).tolist())]
        assert len(extended) == len(set(extended)), "a slot's entries are not adjacent"
        for slot, page in zip(
            unpack_ids(plan.extend_slots), unpack_ids(plan.extend_pages), strict=True
        ):
            self.slots[int(slot)].pages.append(int(page))
        rows = [(slot, self.slots[slot].computed, self._advance(slot)) for slot in decoding]
        for chunk in plan.prefill:
            state = self.slots[chunk.slot]
            assert (
                chunk.start >= state.computed and chunk.start + chunk.num_tokens <= state.num_known
            )
            rows.append((chunk.slot, chunk.start, chunk.num_tokens))
        assert rows or waiting, "an empty step"
        return self._compute(plan.step_id, rows, waiting)

    def _advance(self, slot: int) -> int:
        """Known tokens that a decode step computes: those forced go along, but for one position
        kept free. If they are all, drafts follow."""
        state = self.slots[slot]
        room = len(state.pages) * self.page_size - state.computed
        count = max(1, min(len(state.tokens) - state.computed, room - 1))
        room = min(room - count - 1, state.end - len(state.tokens) - 1)
        if room > 0 and count == len(state.tokens) - state.computed:
            value = 0
            for token in state.tokens:
                value = digest(value, token)
            if draft := drafted(value, room):
                self.drafts[slot] = draft
        if count > 1:
            self.jumps[slot] = count - 1
        return count

    def _compute(
        self, step_id: int, rows: list[tuple[int, int, int]], waiting: list[int]
    ) -> StepResult:
        for (
            slot,
            start,
            count,
        ) in rows:  # a layer writes the K and V of all rows before any row attends
            state, value = self.slots[slot], 0
            inputs = [*state.tokens[: start + count], *self.drafts.get(slot, ())]
            for position, token in enumerate(inputs):
                value = digest(value, token)
                if position >= start:
                    self.memory[self._place(state, position)] = value
        slots: list[int] = []
        tokens: list[int] = []
        deferred: list[int] = []
        vectors: list[SlotVector] = []
        self.written = []
        for slot, start, count in rows:
            self._recur(slot, start, count)
        for slot, start, count in rows:
            state, value = self.slots[slot], 0
            state.computed = start + count
            self.computed_tokens += count
            for position, token in enumerate(state.tokens[: state.computed]):
                value = digest(value, token)
                assert self.memory[self._place(state, position)] == value, (
                    f"wrong KV at position {position}"
                )
            if state.computed == len(state.tokens) and state.pooled:
                vectors.append(SlotVector(slot, array("f", numbers_of(value)).tobytes()))
            elif state.computed == len(state.tokens):
                state.deferred = num_deferred(value) if state.constrained else 0
                if state.deferred:
                    deferred.append(slot)
                else:
                    value = self._verify(slot, value, slots, tokens)
                    self._sample(slot, value, slots, tokens)
        for slot in waiting:
            state, value = self.slots[slot], 0
            alone = not rows and slot == waiting[-1] and not slots
            state.deferred = 0 if alone else state.deferred - 1
            if state.deferred:
                deferred.append(slot)
                continue
            for token in state.tokens:
                value = digest(value, token)
            self._sample(slot, value, slots, tokens)
            if state.released:
                del self.slots[slot]
        self.num_deferred += len(deferred)
        return StepResult(
            step_id=step_id,
            slots=pack_ids(slots),
            token_ids=pack_ids(tokens),
            jump_slots=pack_ids(list(self.jumps)),
            jump_tokens=pack_ids(list(self.jumps.values())),
            deferred_slots=pack_ids(deferred),
            kept_states=pack_ids(self.written),
            vectors=vectors,
            drafts=self.verified,
            step_s=0.01 + self.seconds_per_token * sum(count for _, _, count in rows),
        )

    def _recur(self, slot: int, start: int, count: int) -> None:
        """Advance the state of a slot token by token, and keep what was ordered on the way."""
        if not self.has_states:
            return
        state, expected = self.slots[slot], 0
        for token in state.tokens[:start]:
            expected = digest(expected, token)
        assert state.state == expected, f"wrong state at position {start}"
        orders = {one.position: one.state for one in state.keep if one.position > start}
        for position in range(start, start + count):
            state.state = digest(state.state, state.tokens[position])
            if (row := orders.pop(position + 1, None)) is not None:
                self.kept[row] = state.state
                self.written.append(row)
                self.states_written += 1
        state.keep = [one for one in state.keep if one.position in orders]

    def _verify(self, slot: int, value: int, slots: list[int], tokens: list[int]) -> int:
        """Accept the leading tokens of a draft that the model would have chosen; returns the digest
        behind them."""
        state, draft = self.slots[slot], self.drafts.get(slot)
        if draft is None:
            return value
        accepted: list[int] = []
        while len(accepted) < len(draft) and draft[len(accepted)] == next_token(value):
            accepted.append(draft[len(accepted)])
            value = digest(value, accepted[-1])
        state.tokens += accepted
        self._recur(slot, state.computed, len(accepted))
        state.computed += len(accepted)
        slots += [slot] * len(accepted)
        tokens += accepted
        self.num_accepted += len(accepted)
        self.jumps[slot] = self.jumps.get(slot, 0) + len(accepted)
        self.verified.append(VerifiedDraft(slot, slot % len(DRAFTERS), len(draft), len(accepted)))
        return value

    def _sample(self, slot: int, value: int, slots: list[int], tokens: list[int]) -> None:
        state = self.slots[slot]
        new = [next_token(value)]
        for _ in range(num_forced(value) if state.constrained else 0):
            value = digest(value, new[-1])
            new.append(next_token(value))
        state.tokens += new
        slots += [slot] * len(new)
        tokens += new

    def _place(self, state: _Slot, position: int) -> tuple[int, int]:
        return state.pages[position // self.page_size], position % self.page_size
