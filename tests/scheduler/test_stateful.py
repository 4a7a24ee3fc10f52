"""Tree, allocator and scheduler under random operations, against a model that is a dictionary.

``RADIXRT_SCHEDULER_EXAMPLES`` says how many histories are tried; ``make test-scheduler`` tries thousands.
"""

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.messages import unpack_ids
from radixrt.scheduler.invariants import check_invariants
from tests.scheduler.engine_model import EngineModel, limits

EXAMPLES = int(os.environ.get("RADIXRT_SCHEDULER_EXAMPLES", "100"))
CONTEXT = 96

# A few stems over a small alphabet: prompts share prefixes, diverge inside pages, repeat each other.
STEMS = [[i % 5 for i in range(40)], [i % 5 for i in range(20)] + [9] * 30, [3] * 25, []]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        spare=st.integers(0, 2) | st.integers(0, 30),
        chunk=st.sampled_from([1, 7, 64]),
        budget=st.sampled_from([5, 64, 500]),
        slots=st.integers(1, 6),
        policy=st.sampled_from(["lpm", "suf", "fcfs", "priority"]),
        eviction=st.sampled_from(["lru", "fifo", "priority", "duel"]),
        share=st.booleans() | st.just(True),
        reckless=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        spare: int,
        chunk: int,
        budget: int,
        slots: int,
        policy: str,
        eviction: str,
        share: bool,
        reckless: bool,
    ) -> None:
        self.engine = EngineModel(
            limits(
                page_size=page_size,
                num_pages=-(-CONTEXT // page_size) + spare,
                context_length=CONTEXT,
                chunked_prefill_size=chunk,
                max_prefill_tokens=budget,
                max_running_requests=slots,
                schedule_policy=policy,
                eviction_policy=eviction,
                share_prefixes=share,
            ),
            reckless=reckless,
        )

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 50),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30) | st.just(CONTEXT),
        salt=st.sampled_from(["", "", "tenant"]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        grammar=st.sampled_from([None, None, b"json", b"regex"]),
        num_output=st.integers(0, 5),
        priority=st.integers(-1, 1),
    )
    def arrive(
        self, stem: list[int], cut: int, tail: list[int], max_tokens: int, **options: object
    ) -> None:
        prompt = stem[:cut] + tail
        max_tokens = min(max_tokens, CONTEXT - len(prompt))
        options["min_tokens"] = min(options["min_tokens"], max_tokens)  # type: ignore[type-var]
        options["num_output"] = min(options["num_output"], len(tail) - 1, max_tokens - 1)  # type: ignore[type-var]
        self.engine.add(prompt, max_tokens, **options)  # type: ignore[arg-type]

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 4), min_size=1, max_size=5))
    def conversation_is_forked(self, data: st.DataObject, tail: list[int]) -> None:
        """A request that begins like another one, with as much of its answer as is known."""
        seq_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        request = self.engine.requests[seq_id]
        known = unpack_ids(request.token_ids).tolist() + self.engine.answers[seq_id]
        cut = data.draw(st.integers(0, min(len(known), CONTEXT - len(tail) - 1)))
        prompt = known[:cut] + tail
        max_tokens = data.draw(st.integers(1, CONTEXT - len(prompt)))
        self.engine.add(prompt, max_tokens, salt=request.cache_salt)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def client_goes_away(self, data: st.DataObject) -> None:
        self.engine.release(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @precondition(lambda self: len(self.engine.sent) < 2)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.sent)
    @rule()
    def absorb(self) -> None:
        self.engine.absorb()

    @precondition(lambda self: self.engine.sent)
    @rule()
    def absorb_logits_that_are_not_finite(self) -> None:
        self.engine.absorb(fail_first=True)

    @rule(error=st.sampled_from([None, None, "too complex"]))
    def grammar_is_loaded(self, error: str | None) -> None:
        self.engine.load_grammar(error)

    @rule()
    def flush(self) -> None:
        self.engine.scheduler.flush_cache()

    @rule()
    def steps(self) -> None:
        for _ in range(5):
            if len(self.engine.sent) < 2:
                self.engine.plan()
            if self.engine.sent:
                self.engine.absorb()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_invariants(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self.engine.scheduler.flush_cache()
        assert self.engine.scheduler.kv.allocator.num_free == self.engine.scheduler.limits.num_pages


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
