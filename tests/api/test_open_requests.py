"""The takeover of open requests by the next engine, and requests that kill engines."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.client import open_requests
from radixrt.client.open_requests import Mailbox, OpenRequest, OpenRequests
from radixrt.messages.answers import AnswerChunk, AnswerReport, PromptProgress
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import (
    ChatPrompt,
    GenerateRequest,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)


class Engine:
    """What an engine is sent."""

    def __init__(self) -> None:
        self.sent: list[GenerateRequest] = []
        self.is_alive = True
        self.open = OpenRequests(self.sent.append, lambda: self.is_alive)

    def ask(
        self,
        name: str,
        text: str = "",
        n: int = 1,
        stream: bool = True,
        seed: int = 1,
        **fields: Any,
    ) -> OpenRequest:
        options = RequestOptions(sampling=SamplingParams(n=n, seed=seed))
        request = GenerateRequest(
            request_id=name,
            prompt=TextPrompt(text or name),
            options=options,
            stream=stream,
            **fields,
        )
        opened = OpenRequest(request, Mailbox(1000))
        self.open.add(opened)
        return opened

    def running(self) -> list[str]:
        """Names of the requests that the engine has, in the order in which they came."""
        return [
            r.request_id.partition("#")[0] for r in self.sent if self.open.on_wire(r.request_id)
        ]

    def dies(self) -> None:
        """And another one is started."""
        self.sent.clear()
        self.is_alive = True
        self.open.take_over()


def test_only_the_requests_of_a_dead_replica_are_sent_again() -> None:
    engine = Engine()
    lost, kept = engine.ask("lost"), engine.ask("kept")
    lost.take(chunk(lost, [4, 5]))
    old_id = kept.wire_id
    engine.sent.clear()
    engine.open.take_over([lost.wire_id, "unknown#9"])
    assert engine.running() == ["lost"] and kept.wire_id == old_id
    assert engine.sent[0].resumed[0].token_ids == pack_ids([4, 5])
    assert engine.open.on_wire(old_id) is kept


def test_a_request_that_kills_replicas_runs_alone_and_is_refused_then() -> None:
    engine = Engine()
    killer, other = engine.ask("killer"), engine.ask("other")
    for _ in range(2):
        engine.open.take_over([killer.wire_id])
    assert not killer.wire_id, "it waits until the other has ended"
    engine.open.remove(other)
    assert killer.wire_id
    engine.open.take_over([killer.wire_id])
    (error,) = arrivals(killer)
    assert isinstance(error, RequestError) and error.code == "request_kills_engine"


def test_a_drain_makes_no_suspects() -> None:
    engine = Engine()
    moved, other = engine.ask("moved"), engine.ask("other")
    for _ in range(5):
        engine.open.take_over([moved.wire_id], by_death=False)
    assert moved.wire_id and other.wire_id, "both run, side by side"
    for _ in range(2):
        engine.open.take_over([moved.wire_id])
    engine.open.remove(other)
    engine.open.take_over([moved.wire_id], by_death=False)
    assert moved.wire_id and not arrivals(moved), "it runs alone, and no death was on it alone"


def chunk(opened: OpenRequest, tokens: list[int], index: int = 0, **report: Any) -> AnswerChunk:
    return AnswerChunk(
        request_id=opened.wire_id,
        index=index,
        text="",
        token_ids=pack_ids(tokens),
        report=AnswerReport(**report),
    )


def arrivals(opened: OpenRequest) -> list[Any]:
    unread = opened.arrivals._unread
    return [unread.popleft()[1] for _ in range(len(unread))]


def in_loop(test: Callable[[], None]) -> Callable[[], None]:
    async def run() -> None:
        test()

    def wrapped() -> None:
        asyncio.run(run())

    wrapped.__name__ = test.__name__
    return wrapped


@in_loop
def test_the_next_engine_gets_the_tokens_that_were_told() -> None:
    engine = Engine()
    opened = engine.ask("a", n=3)
    opened.take(chunk(opened, [1, 2], retries=1))
    opened.take(chunk(opened, [3], retries=1))
    opened.take(chunk(opened, [9], index=1, finish_reason="stop"))
    engine.dies()
    (again,) = engine.sent
    told = [unpack_ids(answer.token_ids).tolist() for answer in again.resumed]
    assert told == [[1, 2, 3], [9], []]
    assert [answer.is_complete for answer in again.resumed] == [False, True, False]
    assert again.resumed[0].retries == 1
    assert again.options.sampling.seed == 1


@in_loop
def test_a_late_chunk_of_a_dead_engine_belongs_to_nobody() -> None:
    engine = Engine()
    opened = engine.ask("a")
    before = opened.wire_id
    engine.dies()
    assert engine.open.on_wire(before) is None
    assert engine.open.on_wire(opened.wire_id) is opened


@in_loop
def test_the_report_is_that_of_the_first_engine() -> None:
    engine = Engine()
    opened = engine.ask("a")
    opened.take(chunk(opened, [1], cached_tokens=5, queued_s=1.0, prefill_s=2.0))
    engine.dies()
    opened.take(chunk(opened, [2], cached_tokens=0, output_tokens=2))
    report = arrivals(opened)[-1].report
    assert (report.cached_tokens, report.output_tokens) == (5, 2)
    assert (report.queued_s, report.prefill_s) == (1.0, 2.0)


@in_loop
def test_a_request_that_comes_while_no_engine_lives_waits_for_one() -> None:
    engine = Engine()
    engine.is_alive = False
    early = engine.ask("early")
    gone = engine.ask("gone")
    assert engine.sent == [] and len(engine.open) == 2
    engine.open.remove(gone)
    engine.dies()
    assert engine.running() == ["early"] and early.deaths == 0


@in_loop
def test_what_was_aborted_when_its_engine_died_does_not_go_on() -> None:
    engine = Engine()
    begun, fresh, other = engine.ask("begun"), engine.ask("fresh"), engine.ask("other")
    begun.take(chunk(begun, [1]))
    begun.is_aborted = fresh.is_aborted = True
    engine.dies()
    assert engine.running() == ["other"] and other.deaths == 1
    assert arrivals(begun)[-1].finish_reason == "abort"
    (error,) = arrivals(fresh)
    assert error.code == "request_aborted"


@in_loop
def test_an_answer_that_does_not_stream_goes_on_where_it_was_and_comes_whole() -> None:
    engine = Engine()
    opened = engine.ask("a", stream=False)
    opened.take(chunk(opened, [1, 2, 3], retries=1))
    engine.dies()
    (again,) = engine.sent
    (told,) = again.resumed
    assert unpack_ids(told.token_ids).tolist() == [1, 2, 3] and told.retries == 1
    opened.take(chunk(opened, [1, 2, 3, 4], finish_reason="length"))
    (whole,) = arrivals(opened)
    assert unpack_ids(whole.token_ids).tolist() == [1, 2, 3, 4]


@in_loop
def test_a_request_that_gets_on_while_it_runs_alone_is_not_the_cause_of_the_next_death() -> None:
    engine = Engine()
    slow, other = engine.ask("slow"), engine.ask("other")
    engine.dies()
    engine.dies()
    assert engine.running() == ["slow"]
    slow.take(chunk(slow, [1]))
    engine.dies()
    assert arrivals(slow)[1:] == [] and slow in engine.open
    assert engine.running() == ["other"]  # had no chunk since two deaths
    other.take(chunk(other, [1], finish_reason="stop"))
    engine.open.remove(other)
    assert engine.running() == ["slow"]


@in_loop
def test_a_request_that_kills_runs_alone_and_is_refused_then() -> None:
    engine = Engine()
    killer, other = engine.ask("killer", "boom"), engine.ask("other")
    engine.dies()
    other.take(chunk(other, [1]))
    engine.dies()  # the second death of the killer without a chunk; the other got on
    assert engine.running() == ["killer"]
    late = engine.ask("late")
    assert engine.running() == ["killer"]
    engine.dies()
    (error,) = arrivals(killer)
    assert isinstance(error, RequestError) and error.status == 500
    engine.open.remove(killer)
    assert engine.running() == ["other", "late"]
    with pytest.raises(RequestError, match="died three times"):
        engine.ask("the same again, in a batch", "boom", group_id="batch", group_size=2)
    with pytest.raises(RequestError, match="died three times"):
        engine.ask("again, with the seed that the client chose anew", "boom", seed=2)
    engine.ask("another", "harmless")
    assert late in engine.open and len(arrivals(other)) == 1


@in_loop
def test_the_progress_of_a_prompt_does_not_clear_its_request_of_suspicion() -> None:
    engine = Engine()
    killer = engine.ask("killer")
    for deaths in (1, 2):
        progress = PromptProgress(total=100, cached=0, processed=50, seconds=1.0)
        killer.take(AnswerChunk(request_id="", index=0, text="", token_ids=b"", progress=progress))
        engine.dies()
        assert killer.deaths == deaths and not engine.sent[-1].resumed


def test_a_suspect_that_ends_lets_the_others_go_on() -> None:
    engine = Engine()
    suspect, other = engine.ask("suspect"), engine.ask("other")
    engine.dies()
    engine.dies()  # both have been open at two deaths: one after the other
    assert engine.running() == ["suspect"]
    suspect.take(chunk(suspect, [1], finish_reason="stop"))
    engine.open.remove(suspect)
    assert engine.running() == ["other"]
    engine.open.remove(other)
    engine.ask("new")
    assert engine.running() == ["new"]


@in_loop
def test_what_was_held_back_and_left_is_never_sent() -> None:
    engine = Engine()
    suspect = engine.ask("suspect")
    engine.dies()
    engine.dies()
    held = engine.ask("held")
    engine.open.remove(held)
    engine.open.remove(suspect)
    assert engine.running() == [] and len(engine.open) == 0


def test_the_images_of_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for a takeover; text is not counted."""
    monkeypatch.setattr(open_requests, "MAX_IMAGE_CHARS", 100)
    engine = Engine()

    def ask(name: str, *sizes: int, in_tokens: bool = False) -> OpenRequest:
        parts = [{"type": "image", "data": "A" * size} for size in sizes]
        content = [*parts, {"type": "text", "text": "B" * 200}]
        chat = ChatPrompt([{"role": "user", "content": content}])
        prompt = TokenPrompt(b"", parts) if in_tokens else chat
        opened = OpenRequest(GenerateRequest(request_id=name, prompt=prompt), Mailbox(1000))
        engine.open.add(opened)
        return opened

    first = ask("first", 40, 40)
    for _ in range(2):
        with pytest.raises(RequestError, match="too many images") as refused:
            ask("second", 21)
        assert refused.value.status == 503 and refused.value.retry_after_s
    ask("third", 20, in_tokens=True)
    ask("text")
    engine.open.remove(first)
    with pytest.raises(RequestError, match="too many images"):
        ask("second", 81)
    ask("second", 80)
    assert engine.running() == ["third", "text", "second"]
