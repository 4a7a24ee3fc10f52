"""Drafts are not slower than none, whatever a row of a step costs: scheduler and drafters on a
virtual clock."""

import random
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.cache.engine import VirtualClock
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import StepPlan, StepResult, VerifiedDraft
from radixrt.scheduler.scheduler import Scheduler
from radixrt.worker.drafts.price import NEVER, DraftPrice
from radixrt.worker.drafts.speculator import Speculator
from tests.batches import finished
from tests.scheduler.engine_model import limits

PAGE_SIZE = 16

StepSeconds = Callable[[int, int], float]
"""The time of a step with these rows of answers, drafts included, and prompt tokens."""


def step_s(row_s: float, token_s: float) -> StepSeconds:
    """Of a step that takes 20 ms for eight rows, and ``row_s`` for each further one."""
    return lambda rows, tokens: 0.02 + row_s * (rows - 8) + token_s * tokens


class KnownAnswers:
    """A worker that drafts, and that draws the tokens of given texts."""

    def __init__(self, texts: dict[bytes, list[int]]) -> None:
        self._texts = texts
        """By packed prompt: the prompt and its answer."""
        self._text: dict[int, list[int]] = {}
        """By slot."""
        self._known: dict[int, int] = {}
        """By slot: tokens of the prompt and of the answer so far."""
        self._decoding: list[int] = []
        self._pages: dict[int, int] = {}
        self._speculator = Speculator((), lambda slot: [], lambda slot, draft: draft)
        self._price = DraftPrice()
        self._decoded = 0
        """Decoding sequences of the last step."""

    def step(self, plan: StepPlan) -> tuple[StepResult, int]:
        """The result, and the rows of answers that were computed."""
        self._apply(plan)
        self._decoded = len(self._decoding)
        if plan.prefill:
            price = self._price.beside_prompts(self._decoded, plan.draft_saving)
        else:
            price = self._price.next(self._decoded)
        drafts = {slot: self._draft(slot, price) for slot in self._decoding}
        rows = len(self._decoding) + sum(map(len, drafts.values()))
        ended = [p.slot for p in plan.prefill if p.start + p.num_tokens == self._known[p.slot]]
        new: dict[int, list[int]] = {}
        verified: list[VerifiedDraft] = []
        for slot in [*self._decoding, *ended]:
            text = self._text[slot][self._known[slot] :]
            draft = drafts.get(slot, [])
            accepted = next((i for i, t in enumerate(draft) if t != text[i]), len(draft))
            new[slot] = text[: accepted + 1]
            self._known[slot] += accepted + 1
            if draft:
                verified += self._speculator.verified(slot, len(draft), accepted)
        self._decoding += ended
        slots = [slot for slot, tokens in new.items() for _ in tokens]
        token_ids = np.array([t for tokens in new.values() for t in tokens], dtype=np.int32)
        self._speculator.extend(np.array(slots, dtype=np.int64), token_ids)
        advanced = {slot: len(tokens) - 1 for slot, tokens in new.items() if len(tokens) > 1}
        result = StepResult(
            step_id=plan.step_id,
            slots=pack_ids(slots),
            token_ids=pack_ids(token_ids),
            jump_slots=pack_ids(list(advanced)),
            jump_tokens=pack_ids(list(advanced.values())),
            drafts=verified,
        )
        return result, rows

    def learn(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Note the time of the last step."""
        drafted = sum(draft.num_drafted for draft in result.drafts)
        accepted = sum(draft.num_accepted for draft in result.drafts)
        if tokens := sum(chunk.num_tokens for chunk in plan.prefill):
            self._price.observe_prompts(self._decoded, drafted, tokens, seconds)
        else:
            self._price.observe(self._decoded, drafted, self._decoded + accepted, seconds)

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._decoding.remove(slot)
            self._speculator.release(slot)
        for admit in plan.admit:
            self._text[admit.slot] = self._texts[admit.token_ids]
            self._known[admit.slot] = len(unpack_ids(admit.token_ids))
            self._pages[admit.slot] = len(unpack_ids(admit.pages))
            self._speculator.admit(admit)
        for slot in unpack_ids(plan.extend_slots).tolist():
            self._pages[slot] += 1

    def _draft(self, slot: int, price: float) -> list[int]:
        if price >= NEVER:
            return []
        room = self._pages[slot] * PAGE_SIZE - self._known[slot] - 1
        return self._speculator.propose(slot, room, price)


def text_of(rng: random.Random, phrases: list[list[int]]) -> list[int]:
    """Some 200 tokens: phrases that other tokens interrupt."""
    text: list[int] = []
    while len(text) < 200:
        phrase = rng.choice(phrases)
        text += phrase[: rng.randint(1, len(phrase))]
    return text


def tokens_per_s(seconds_of: StepSeconds, noise: float, *, speculates: bool) -> float:
    """Of eight conversations at a time, with answers of 20 to 100 tokens, 24 in all."""
    rng, clock = random.Random(3), VirtualClock()
    phrases = [[rng.randrange(300) for _ in range(rng.randint(2, 7))] for _ in range(12)]
    texts = [text_of(rng, phrases) for _ in range(24)]
    waiting = deque(enumerate(texts))
    worker = KnownAnswers({pack_ids(text[:40]): text for text in texts})
    settings = limits(
        page_size=PAGE_SIZE,
        num_pages=1000,
        max_step_ms=None,
        max_prefill_tokens=512,
        chunked_prefill_size=512,
        speculates=speculates,
    )
    scheduler = Scheduler(settings, clock)
    sent: deque[StepPlan] = deque()
    running = tokens = 0
    while waiting or running:
        while waiting and running < 8:
            number, text = waiting.popleft()
            sampling = SamplingParams(
                temperature=0.0, max_tokens=20 + number % 9 * 10, ignore_eos=True
            )
            prompt, options = pack_ids(text[:40]), RequestOptions(sampling=sampling)
            scheduler.add(SequenceRequest(seq_id=number, token_ids=prompt, options=options))
            running += 1
        while len(sent) < 2 and (plan := scheduler.plan()) is not None:
            sent.append(plan)
        plan = sent.popleft()
        result, rows = worker.step(plan)
        seconds = seconds_of(rows, sum(chunk.num_tokens for chunk in plan.prefill))
        seconds *= rng.uniform(1 - noise, 1 + noise)
        clock.now += seconds
        worker.learn(plan, result, seconds)
        batch = scheduler.absorb(msgspec.structs.replace(result, step_s=seconds))
        tokens += batch.num_tokens
        running -= len(finished(batch))
    return tokens / clock.now


@pytest.mark.parametrize("row_s", [0.0025, 0.002, 0.0015], ids=str)
@pytest.mark.parametrize("token_s", [0.0015, 0.0005])
def test_a_server_whose_rows_cost_as_much_as_tokens_is_not_slowed_down(
    row_s: float, token_s: float
) -> None:
    """So it is with packed weights on AVX2: a step computes, and does not wait for memory. The
    server has just started."""
    seconds_of = step_s(row_s, token_s)
    off = tokens_per_s(seconds_of, 0.05, speculates=False)
    assert tokens_per_s(seconds_of, 0.05, speculates=True) > 0.97 * off


def test_a_server_whose_rows_cost_little_gains() -> None:
    seconds_of = step_s(row_s=0.0002, token_s=0.0005)
    off = tokens_per_s(seconds_of, 0.05, speculates=False)
    assert tokens_per_s(seconds_of, 0.05, speculates=True) > 1.2 * off
