"""Scheduler and fake worker with up to two steps between them, and the answers they give."""

import dataclasses
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.scheduling import SchedulerSettings
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.messages.calls import CallReply
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, GrammarUse, LoadGrammar
from radixrt.messages.ids import num_ids, pack_ids, unpack_ids
from radixrt.messages.images import ImageLoaded, ImageRun, LoadImage
from radixrt.messages.message import Message
from radixrt.messages.requests import (
    NO_HINTS,
    NO_TENANT,
    CacheHints,
    IdleKind,
    PoolingRequest,
    RequestOptions,
    Tenant,
)
from radixrt.messages.sequences import SequenceRefused, SequenceRequest, TokenBatch
from radixrt.messages.steps import NO_TOKEN, StepPlan
from radixrt.scheduler.calls import Calls
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.admission import FORECASTS
from radixrt.scheduler.scheduler import Scheduler
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars
from tests.batches import finished, started
from tests.scheduler.fake_disk import FakeDisk
from tests.scheduler.fake_worker import FakeWorker, digest, expected_answer, numbers_of

EOS = 7


def limits(**changes: object) -> SchedulerLimits:
    settings: dict = dict(
        max_running_requests=8,
        max_queued_requests=1000,
        max_queue_seconds=0,
        max_step_ms=0,
        max_prefill_tokens=64,
        chunked_prefill_size=32,
        context_length=256,
        num_pages=64,
        page_size=4,
        eos_token_ids=(EOS,),
    )
    given = {**settings, **changes}
    names = {setting.name for setting in dataclasses.fields(SchedulerSettings)}
    return SchedulerLimits(
        settings=SchedulerSettings(**{name: given.pop(name) for name in names & given.keys()}),
        **given,
    )


def expect_nothing(*_: object) -> np.ndarray:
    """A forecast that answers take no pages."""
    return np.zeros((2, FORECASTS))


class EngineModel:
    """Drives a scheduler step by step and checks every answer against an undisturbed model."""

    def __init__(
        self,
        scheduler_limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        reckless: bool = False,
        has_states: bool = False,
        disk: DiskPages | None = None,
    ) -> None:
        """
        Args:
            disk: pages on disk, which the fake worker's :class:`FakeDisk` keeps.
            reckless: admit as if no answer took memory, so that much has to be retracted.
            has_states: the model has recurrent layers.
        """
        self.scheduler = Scheduler(scheduler_limits, clock, disk)
        if reckless:
            self.scheduler.admission._forecast = expect_nothing  # type: ignore[method-assign]
        self.worker = FakeWorker(scheduler_limits.page_size, has_states=has_states)
        self.disk = FakeDisk(self.worker)
        self.orders: deque[tuple[int, Message]] = deque()
        """Orders to move pages that the worker has not got: each after so many steps."""
        self.sent: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.requests: dict[int, SequenceRequest] = {}
        self.answers: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.finished: dict[int, str] = {}
        self.grammars = SentGrammars(self._to_scheduler, max_idle_grammars=1)
        self.loading: deque[GrammarKey] = deque()
        """Grammars that the worker has been told to load and has not reported."""
        self.loaded: set[GrammarKey] = set()
        self.num_loads = 0

    def calls(
        self, replies: list[CallReply], announce_drain: Callable[[], object] = lambda: None
    ) -> Calls:
        """The scheduler's answers to calls, which go to ``replies``."""
        return Calls(self.scheduler, replies.append, self.scheduler.stats, announce_drain)

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str = "",
        *,
        grammar: bytes | None = None,
        num_output: int = 0,
        priority: int = 0,
        cache_hints: CacheHints = NO_HINTS,
        tenant: Tenant = NO_TENANT,
        pool: PoolingRequest | None = None,
        adapter: str = "",
        messages_end: int = 0,
        shares: bool = False,
        idle: IdleKind = "",
        images: Sequence[ImageRun] = (),
        **sampling: object,
    ) -> int:
        seq_id = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        use = None
        if grammar is not None:
            compiled = Grammar.compiled("llguidance", grammar)
            self.grammars.use(compiled)
            use = GrammarUse(compiled.key, excluded_from=num_output)
        request = SequenceRequest(
            seq_id=seq_id,
            token_ids=pack_ids(prompt),
            num_output=num_output,
            messages_end=messages_end,
            images=list(images),
            grammar=use,
            has_begun=num_output > 0,
            options=RequestOptions(
                sampling=params,
                tenant=tenant,
                root=tenant.root(salt, adapter),
                priority=priority,
                cache_hints=cache_hints,
                pool=pool,
                shares_answers=shares,
                idle=idle,
            ),
        )
        for run in images:
            self.scheduler.images.load(LoadImage(key=run.image, pixels=b"", shape=(0,)))
            if self.scheduler.images.take_orders():
                self.scheduler.loaded(ImageLoaded(key=run.image))
        refused = self.scheduler.add(request)
        assert refused is None or refused.grammar_lost
        self.requests[seq_id] = request
        self.answers[seq_id] = []
        if (given := self.scheduler.answers.take_outputs()) is not None:
            self._take(given)
        if refused is not None:
            self._refuse(refused)
        return seq_id

    def _to_scheduler(self, message: msgspec.Struct) -> None:
        match message:
            case LoadGrammar():
                self.scheduler.grammars.load(message)
            case DropGrammar():
                self.scheduler.grammars.drop(message)

    def _refuse(self, refused: SequenceRefused) -> None:
        key = self._key_of(refused.seq_id)
        if refused.grammar_lost and key is not None:
            self.grammars.lost(key)
        self._end(refused.seq_id, "refused")

    def _end(self, seq_id: int, reason: str) -> None:
        """Note how an answer has ended, and let go of its grammar as the tokenizer process does."""
        if seq_id in self.finished:
            return
        self.finished[seq_id] = reason
        if (key := self._key_of(seq_id)) is not None:
            self.grammars.release(key)

    def _key_of(self, seq_id: int) -> GrammarKey | None:
        use = self.requests[seq_id].grammar
        return None if use is None else use.key

    def release(self, seq_id: int) -> None:
        self.scheduler.release(np.array([seq_id], dtype=np.int32))
        self._end(seq_id, "released")

    def load_grammar(self, error: str | None = None) -> None:
        """The worker reports the grammar it was told of first."""
        self._take_orders()
        if not self.loading:
            return
        key = self.loading.popleft()
        if error is None:
            self.loaded.add(key)
        for refused in self.scheduler.loaded(GrammarLoaded(key=key, error=error)):
            self._refuse(refused)

    def _take_orders(self) -> None:
        for order in self.scheduler.grammars.take_orders():
            match order:
                case LoadGrammar():
                    assert order.grammar.key not in {*self.loading, *self.loaded}
                    self.loading.append(order.grammar.key)
                    self.num_loads += 1
                case DropGrammar():
                    assert order.key not in self.loading
                    self.loaded.discard(order.key)

    def plan(self) -> StepPlan | None:
        self._take_orders()
        plan = self.scheduler.plan()
        self._send_orders()
        if plan is not None:
            for admit in plan.admit:
                assert admit.grammar is None or admit.grammar.key in self.loaded
            self.sent.append(plan)
            self.plans.append(plan)
        return plan

    def _send_orders(self) -> None:
        num_planned = len(self.plans)
        self.orders += [(num_planned, order) for order in self.scheduler.take_moves()]
        self._deliver_orders()

    def _deliver_orders(self) -> None:
        """Give the worker the orders that come before its next step."""
        num_done = len(self.plans) - len(self.sent)
        while self.orders and self.orders[0][0] <= num_done:
            self.disk.take(self.orders.popleft()[1])

    def answer_order(self) -> bool:
        """The worker answers its oldest order to move pages; False: it has none."""
        if (answer := self.disk.work()) is None:
            return False
        self.scheduler.moved(answer)
        return True

    def absorb(self, *, fail_first: bool = False) -> TokenBatch:
        """Take the oldest step back; with ``fail_first`` its first token could not be sampled."""
        result = self.worker.step(self.sent.popleft())
        self._deliver_orders()
        if fail_first and result.token_ids:
            tokens = unpack_ids(result.token_ids).copy()
            tokens[0] = NO_TOKEN
            result = msgspec.structs.replace(result, token_ids=pack_ids(tokens))
        return self._take(self.scheduler.absorb(result))

    def _take(self, batch: TokenBatch) -> TokenBatch:
        """Note the tokens of a batch, and check the answers that end with it."""
        for refused in batch.refused:
            self._refuse(refused)
        for seq_id, report in started(batch).items():
            self.cached[seq_id] = report.cached_tokens
            self.written[seq_id] = report.cache_write_tokens
            request = self.requests[seq_id]
            assert report.prompt_tokens == num_ids(request.token_ids) - request.num_output
            assert 0 <= report.cached_tokens <= report.prompt_tokens
            assert report.cached_tokens < num_ids(request.token_ids) or report.replayed_tokens
            assert 0 <= report.cache_write_tokens <= report.prompt_tokens - report.cached_tokens
        for seq_id, output in batch.outputs.items():
            assert seq_id not in self.finished, "a token for an answer that has ended"
            self.answers[seq_id] += output.token_ids
        pooled = {i for i in finished(batch) if self.requests[i].options.pool is not None}
        vectors = {i: output.vector for i, output in batch.outputs.items() if output.vector}
        assert vectors.keys() == pooled, "numbers come with the end, and only where wanted"
        for seq_id, vector in vectors.items():
            state = 0
            for token in unpack_ids(self.requests[seq_id].token_ids).tolist():
                state = digest(state, token)
            assert vector == array("f", numbers_of(state)).tobytes()
        for seq_id, report in finished(batch).items():
            assert report.finish_reason is not None
            self._end(seq_id, report.finish_reason)
            assert self.answers[seq_id] == self.expected(seq_id)
            assert (
                report.output_tokens == len(self.answers[seq_id]) + self.requests[seq_id].num_output
            )
        return batch

    def expected(self, seq_id: int) -> list[int]:
        request = self.requests[seq_id]
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
        prompt = unpack_ids(request.token_ids).tolist()
        assert sampling.max_tokens is not None
        num_output = request.num_output
        # A grammar decides where an answer may end; it knows no least length.
        min_tokens = 0 if request.grammar is not None else sampling.min_tokens - num_output
        return expected_answer(prompt, sampling.max_tokens - num_output, stops, min_tokens)

    def run(self, max_steps: int = 100_000, steps_in_flight: int = 2) -> None:
        """Until everything has finished; the invariants are checked once a step."""
        for _ in range(max_steps):
            while len(self.sent) < steps_in_flight and self.plan() is not None:
                pass
            check_invariants(self.scheduler)
            if not self.sent:
                if self.answer_order():
                    continue
                if not self.loading:
                    break
                self.load_grammar()
                continue
            self.absorb()
        assert set(self.finished) == set(self.requests), "somebody never finished"
        assert self.scheduler.num_running == 0
