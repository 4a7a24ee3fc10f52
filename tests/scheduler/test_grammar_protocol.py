"""Grammars between tokenizer process, scheduler and two ranks, whose messages take any time to
arrive. ``make test-scheduler`` tries three times as many orders."""

import os
import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, GrammarUse, LoadGrammar
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import ReleaseSequences, SequenceRefused, SequenceRequest
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.scheduler import Scheduler
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars
from tests.batches import finished
from tests.scheduler.engine_model import limits
from tests.scheduler.fake_worker import FakeWorker

GRAMMARS = [Grammar.compiled("llguidance", source) for source in (b"a", b"b", b"c")]


class Rank:
    """Obeys its orders one after another; loading ends at any time."""

    def __init__(self) -> None:
        self.orders: deque[LoadGrammar | DropGrammar | StepPlan] = deque()
        self.loading: set[GrammarKey] = set()
        self.loaded: set[GrammarKey] = set()

    def obey(self) -> None:
        match self.orders.popleft():
            case LoadGrammar(grammar):
                assert grammar.key not in self.loading | self.loaded
                self.loading.add(grammar.key)
            case DropGrammar(key):
                assert key not in self.loading
                self.loaded.discard(key)
            case StepPlan(admit=admits):
                for admit in admits:
                    assert admit.grammar is not None and admit.grammar.key in self.loaded


class Wires:
    """All parties, and the messages under way between them; every link keeps its order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.to_scheduler: deque[msgspec.Struct] = deque()
        self.to_tokenizer: deque[tuple[int, SequenceRefused | None]] = deque()
        self.answers: deque[GrammarLoaded] = deque()
        self.sent = SentGrammars(self.to_scheduler.append, max_idle_grammars=1)
        self.scheduler = Scheduler(limits(num_ranks=2))
        self.worker = FakeWorker(4)
        self.ranks = [Rank(), Rank()]
        self.live: dict[int, GrammarKey] = {}
        self.outcomes: dict[str, int] = {"finished": 0, "refused": 0, "aborted": 0}
        self.num_loads = 0
        self.next_id = 0

    # ------------------------------------------------------------ the tokenizer process

    def begin(self) -> None:
        grammar = self.random.choice(GRAMMARS)
        self.sent.use(grammar)
        self.live[self.next_id] = grammar.key
        self.to_scheduler.append(
            SequenceRequest(
                seq_id=self.next_id,
                token_ids=pack_ids([self.next_id, 1, 2]),
                options=RequestOptions(sampling=SamplingParams(max_tokens=1)),
                grammar=GrammarUse(grammar.key),
            )
        )
        self.next_id += 1

    def abort(self) -> None:
        seq_id = self.random.choice(sorted(self.live))
        self.to_scheduler.append(ReleaseSequences(pack_ids([seq_id])))
        self._end(seq_id, "aborted")

    def read_news(self) -> None:
        seq_id, refused = self.to_tokenizer.popleft()
        if seq_id not in self.live:
            return
        if refused is not None:
            self.sent.lost(self.live[seq_id])
            self.to_scheduler.append(ReleaseSequences(pack_ids([seq_id])))
        self._end(seq_id, "finished" if refused is None else "refused")

    def _end(self, seq_id: int, outcome: str) -> None:
        self.sent.release(self.live.pop(seq_id))
        self.outcomes[outcome] += 1

    # ------------------------------------------------------------ the scheduler

    def schedule(self) -> None:
        match message := self.to_scheduler.popleft():
            case LoadGrammar():
                self.scheduler.grammars.load(message)
                self.num_loads += 1
            case DropGrammar():
                self.scheduler.grammars.drop(message)
            case SequenceRequest():
                self._refuse([self.scheduler.add(message)])
            case ReleaseSequences(seq_ids):
                self.scheduler.release(unpack_ids(seq_ids))
        self._give_orders()

    def hear_rank(self) -> None:
        self._refuse(self.scheduler.loaded(self.answers.popleft()))
        self._give_orders()

    def _refuse(self, refused: "list[SequenceRefused] | list[SequenceRefused | None]") -> None:
        self.to_tokenizer.extend((one.seq_id, one) for one in refused if one is not None)

    def _give_orders(self) -> None:
        """As the process does: grammars first, then the next step, whose tokens are back at once,
        or held for some steps."""
        orders = self.scheduler.grammars.take_orders()
        plan = self.scheduler.plan()
        for rank in self.ranks:
            rank.orders.extend(orders)
            if plan is not None:
                rank.orders.append(plan)
        if plan is not None:
            batch = self.scheduler.absorb(self.worker.step(plan))
            self.to_tokenizer.extend((seq_id, None) for seq_id in finished(batch))

    # ------------------------------------------------------------ what may happen next

    def load(self, rank: Rank, errors: float) -> None:
        key = self.random.choice(sorted(rank.loading))
        rank.loading.discard(key)
        error = "damaged" if self.random.random() < errors else None
        if error is None:
            rank.loaded.add(key)
        self.answers.append(GrammarLoaded(key=key, error=error))

    def moves(self, errors: float) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        moves += [self.schedule] if self.to_scheduler else []
        moves += [self.read_news] if self.to_tokenizer else []
        moves += [self.hear_rank] if self.answers else []
        moves += [self._give_orders] if any(s.deferred for s in self.worker.slots.values()) else []
        for rank in self.ranks:
            moves += [rank.obey] if rank.orders else []
            moves += [lambda rank=rank: self.load(rank, errors)] if rank.loading else []
        return moves


@pytest.mark.parametrize("seed", range(60 if "RADIXRT_SCHEDULER_EXAMPLES" in os.environ else 20))
def test_no_order_of_messages_loses_a_grammar_or_an_answer(seed: int) -> None:
    wires = Wires(seed)
    errors = 0.4 if seed % 2 else 0.0
    for _ in range(1000):
        moves = wires.moves(errors)
        moves += [wires.begin] if len(wires.live) < 6 else []
        moves += [wires.abort] if wires.live and wires.random.random() < 0.2 else []
        wires.random.choice(moves)()
    while moves := wires.moves(errors):
        wires.random.choice(moves)()
    assert not wires.live and wires.outcomes["finished"] > 10 and wires.outcomes["aborted"] > 0
    assert bool(errors) == bool(wires.outcomes["refused"])
    assert wires.num_loads > len(GRAMMARS), "nothing was dropped and sent again"
    entries = wires.scheduler.grammars._entries
    assert entries.keys() == wires.sent._sent.keys() and len(wires.sent._idle) <= 1
    for rank in wires.ranks:
        assert rank.loaded <= entries.keys()
        assert rank.loaded >= {key for key, entry in entries.items() if entry.error is None}


def test_drops_that_did_not_wait_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: a release before the end of its sequence lets a rank admit without the
    grammar."""
    release = SentGrammars.release

    def too_early(self: SentGrammars, key: GrammarKey) -> None:
        release(self, key)
        if key in self._idle:
            self._idle_bytes -= self._idle.pop(key)
            self._drop(key)
            self._to_scheduler.__self__.rotate(1)  # type: ignore[attr-defined]

    monkeypatch.setattr(SentGrammars, "release", too_early)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(20):
            test_no_order_of_messages_loses_a_grammar_or_an_answer(seed)
