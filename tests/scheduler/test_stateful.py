"""Tree, allocator and scheduler under random operations, against a model that is a dictionary.

``RADIXRT_SCHEDULER_EXAMPLES`` says how many histories are tried; ``make test-scheduler`` tries
thousands.
"""

import os

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import (
    DEFAULT_POOLING,
    NO_HINTS,
    NO_TENANT,
    CacheHints,
    Retention,
    Tenant,
)
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.radix.leases import Lease
from tests.scheduler.engine_model import EngineModel, limits

EXAMPLES = int(os.environ.get("RADIXRT_SCHEDULER_EXAMPLES", "15"))
CONTEXT = 96

# A few stems over a small alphabet: prompts share prefixes, diverge inside pages, repeat each
# other.
STEMS = [[i % 5 for i in range(40)], [i % 5 for i in range(20)] + [9] * 30, [3] * 25, []]

HINTS = st.just(NO_HINTS) | st.builds(
    CacheHints,
    retain=st.lists(
        st.builds(
            Retention,
            level=st.sampled_from(["none", "default", "high"]),
            num_tokens=st.none() | st.integers(0, 60),
            ttl_s=st.none() | st.integers(1, 9),
        ),
        max_size=2,
    ),
    next_use_s=st.none() | st.integers(0, 20),
    session=st.sampled_from(["", "one", "two"]),
)


TENANTS = [
    NO_TENANT,
    NO_TENANT,
    Tenant(name="a", cache_namespace="key:a", max_cached_fraction=0.3),
    Tenant(name="c", cache_namespace="key:c", max_cached_fraction=0.1),
    Tenant(name="b", weight=3.0),
]


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        spare=st.integers(0, 2) | st.integers(0, 30) | st.just(300),
        chunk=st.sampled_from([1, 7, 64]),
        budget=st.sampled_from([5, 64, 500]),
        max_step_ms=st.sampled_from([0, None, 15]),
        slots=st.integers(1, 6),
        policy=st.sampled_from(["lpm", "suf", "fcfs", "priority"]),
        eviction=st.sampled_from(["value", "lru", "fifo", "priority"]),
        share=st.booleans() | st.just(True),
        reckless=st.booleans(),
        pinned=st.sampled_from([0.1, 0.5, 1.0]),
        speculates=st.booleans(),
        states=st.sampled_from([0, 0, 3, 8, 40]),
        interval=st.integers(1, 3),
    )
    def start(
        self,
        page_size: int,
        spare: int,
        chunk: int,
        budget: int,
        max_step_ms: float | None,
        slots: int,
        policy: str,
        eviction: str,
        share: bool,
        reckless: bool,
        pinned: float,
        speculates: bool,
        states: int,
        interval: int,
    ) -> None:
        self.clock = Clock()
        self.leased: dict[str, tuple[Lease, np.ndarray, str]] = {}
        self.engine = EngineModel(
            limits(
                page_size=page_size,
                num_pages=-(-CONTEXT // page_size) + spare,
                context_length=CONTEXT,
                chunked_prefill_size=chunk,
                max_prefill_tokens=budget,
                max_step_ms=max_step_ms,
                max_running_requests=slots,
                schedule_policy=policy,
                eviction_policy=eviction,
                disable_radix_cache=not share,
                max_pinned_fraction=pinned,
                speculates=speculates,
                kept_states=states if share else 0,
                state_interval=interval * page_size,
            ),
            self.clock,
            reckless=reckless,
            has_states=states > 0,
        )
        self.engine.worker.seconds_per_token = 0.001

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 50),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        max_tokens=st.integers(0, 30) | st.just(CONTEXT),
        salt=st.sampled_from(["", "", "tenant"]),
        tenant=st.sampled_from(TENANTS),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        grammar=st.sampled_from([None, None, b"json", b"regex"]),
        num_output=st.integers(0, 5),
        priority=st.integers(-1, 1),
        cache_hints=HINTS,
        messages_end=st.just(0) | st.integers(0, 40),
    )
    def arrive(
        self, stem: list[int], cut: int, tail: list[int], max_tokens: int, **options: object
    ) -> None:
        prompt = stem[:cut] + tail
        max_tokens = min(max_tokens, CONTEXT - len(prompt))
        options["min_tokens"] = min(options["min_tokens"], max_tokens)  # type: ignore[type-var]
        num_output = min(options["num_output"], len(tail) - 1, max_tokens - 1)  # type: ignore[type-var]
        options["num_output"] = max(0, num_output)
        self.engine.add(prompt, max_tokens, **options)  # type: ignore[arg-type]

    @rule(stem=st.sampled_from(STEMS), cut=st.integers(0, 50), last=st.integers(0, 4))
    def a_prompt_for_its_numbers_arrives(self, stem: list[int], cut: int, last: int) -> None:
        self.engine.add([*stem[:cut], last], max_tokens=0, pool=DEFAULT_POOLING)

    @rule(
        stem=st.sampled_from(STEMS),
        cuts=st.lists(st.integers(1, 50), min_size=2, max_size=4),
        new=st.integers(10, 1000),
    )
    def several_prompts_arrive_together(self, stem: list[int], cuts: list[int], new: int) -> None:
        """They share the chunks of the next steps; with ``new`` tokens at their beginning, none of
        them is cached."""
        for cut in cuts:
            self.engine.add([new] * 8 + stem[:cut] + [cut], max_tokens=2)

    @precondition(lambda self: self.engine.requests)
    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=5),
        cache_hints=HINTS,
    )
    def conversation_is_forked(
        self, data: st.DataObject, tail: list[int], cache_hints: CacheHints
    ) -> None:
        """A request that begins like another one, with as much of its answer as is known."""
        seq_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        request = self.engine.requests[seq_id]
        known = unpack_ids(request.token_ids).tolist() + self.engine.answers[seq_id]
        cut = data.draw(st.integers(0, min(len(known), CONTEXT - len(tail) - 1)))
        prompt = known[:cut] + tail
        max_tokens = data.draw(st.integers(1, CONTEXT - len(prompt)))
        salt = request.options.root.salt
        tenant = request.options.tenant
        self.engine.add(prompt, max_tokens, salt, tenant=tenant, cache_hints=cache_hints)

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

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), ttl_s=st.integers(1, 9))
    def pin(self, data: st.DataObject, ttl_s: float) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        request = self.engine.requests[seq_id]
        tokens, root = unpack_ids(request.token_ids), request.options.root
        kv = self.engine.scheduler.state.kv
        try:
            lease = kv.leases.pin(tokens, root, ttl_s)
        except RequestError as error:
            assert error.status in (400, 409, 429)
        else:
            self.leased[lease.lease_id] = (lease, tokens, root)
        assert (
            kv.tree.num_pinned_pages
            <= self.engine.scheduler.state.limits.settings.max_pinned_fraction
            * self.engine.scheduler.state.limits.num_pages
        )

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leased)))
        del self.leased[lease_id]
        try:
            self.engine.scheduler.state.kv.leases.release(lease_id)
        except RequestError as error:
            assert error.status == 404

    @rule(session=st.sampled_from(["one", "two"]), salt=st.sampled_from(["", "tenant"]))
    def session_ends(self, session: str, salt: str) -> None:
        self.engine.scheduler.release_session(session, CacheRoot(salt=salt))

    @rule(seconds=st.integers(1, 5))
    def time_goes_by(self, seconds: int) -> None:
        self.clock.now += seconds

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

    @invariant()
    def what_is_leased_is_in_the_tree(self) -> None:
        if not hasattr(self, "engine"):
            return
        tree, live = (
            self.engine.scheduler.state.kv.tree,
            self.engine.scheduler.state.kv.leases.all(),
        )
        for lease, tokens, root in self.leased.values():
            if lease in live:
                match = tree.match(tokens, root)
                assert match is not None and match.num_pages >= lease.num_pages

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()  # in spite of all leases
        self.clock.now += 10
        self.engine.plan()  # all leases have expired
        assert len(self.engine.scheduler.state.kv.leases) == 0
        self.engine.scheduler.flush_cache()
        assert (
            self.engine.scheduler.state.kv.allocator.num_free
            == self.engine.scheduler.state.limits.num_pages
        )
        states = self.engine.scheduler.state.kv.states
        assert states.num_free == states.num_rows


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
