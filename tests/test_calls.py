"""Each call has a handler in the process that answers it, and its failure ends it alone."""

from typing import Any

import msgspec
import pytest

from radixrt.messages.calls import (
    Call,
    CallReply,
    DrainReplicaCall,
    FlushCacheCall,
    SchedulerCall,
    StatsCall,
    kinds_of,
)
from radixrt.messages.links import ToScheduler, ToTokenizerFromApi
from radixrt.scheduler.calls import Calls as AtScheduler
from radixrt.scheduler.calls import DrainReplica
from radixrt.tokenizer.calls import Calls as AtTokenizer
from tests.scheduler.engine_model import EngineModel, limits


@pytest.mark.parametrize("kind", kinds_of(Call), ids=lambda kind: kind.__name__)
def test_each_call_has_a_handler_where_it_is_answered(kind: type[Call[Any]]) -> None:
    process = AtScheduler if issubclass(kind, SchedulerCall) else AtTokenizer
    handlers = vars(process)["_answer"].dispatcher
    assert handlers.dispatch(kind) is not handlers.dispatch(object)


def test_links_carry_every_call() -> None:
    for link, base in ((ToTokenizerFromApi, Call), (ToScheduler, SchedulerCall)):
        assert set(kinds_of(base)) <= set(link.__args__)
        msgspec.msgpack.Decoder(link)


def test_a_call_that_fails_does_not_end_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, replies = EngineModel(limits()), list[CallReply]()
    calls = model.calls(replies)
    monkeypatch.setattr(model.scheduler, "flush_cache", lambda: {}[1])
    calls.take(FlushCacheCall(call_id=1))
    calls.take(StatsCall(call_id=2))
    failed, answered = replies
    assert failed.error is not None and (failed.call_id, failed.error.status) == (1, 500)
    assert answered.error is None and answered.call_id == 2


def test_a_drained_replica_answers_before_it_ends() -> None:
    replies, drains = list[CallReply](), list[str]()
    calls = EngineModel(limits()).calls(replies, lambda: drains.append("drains"))
    with pytest.raises(DrainReplica):
        calls.take(DrainReplicaCall(0, call_id=5))
    assert [(reply.call_id, reply.value) for reply in replies] == [(5, True)]
    assert drains == ["drains"]
