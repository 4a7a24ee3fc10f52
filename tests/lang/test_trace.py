"""A trace shows every call, tool and wait of a program: as text, and as valid Chrome trace
events."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import radixrt.lang as rl
from radixrt.lang.backends.protocol import ServerTimes
from radixrt.lang.errors import SourceLine
from radixrt.lang.tracing.records import CallRecord, phases_of
from tests.lang.scripted_backend import ScriptedBackend

Event = dict[str, Any]


def owner_of(place: str) -> str:
    """Get the owner of a place."""
    return place


@rl.function
def vote(s: rl.State, topic: str) -> None:
    s += rl.user(topic)
    forks = s.fork(2)
    for fork in forks:
        fork += rl.assistant(rl.gen("opinion"))
    s += rl.user("; ".join(fork["opinion"] for fork in forks))
    s += rl.assistant(rl.gen("end"))


def events_of(trace: rl.Trace) -> list[Event]:
    """The events of a trace, checked against the Trace Event Format."""
    data = trace.data()
    assert json.loads(json.dumps(data)) == data
    assert data["displayTimeUnit"] == "ms" and data["otherData"]["title"]
    events: list[Event] = data["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Required fields by phase type; slices of a thread nest; both ends of each arrow lie in
    slices."""
    fields = {
        "M": {"args"},
        "X": {"dur", "cat", "args"},
        "s": {"id", "cat"},
        "f": {"id", "cat", "bp"},
    }
    for event in events:
        assert event.keys() == {"ph", "name", "pid", "tid", "ts"} | fields[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        assert all(
            isinstance(event[name], int) and event[name] >= 0 for name in ("pid", "tid", "ts")
        )
        assert event.get("dur", 0) >= 0 and isinstance(event.get("dur", 0), int)
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in slices_of(events):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        open_ends: list[int] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], event
            open_ends.append(event["ts"] + event["dur"])
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks.keys() <= named
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) + len(ends) == sum(
        e["ph"] in "sf" for e in events
    )
    for number, event in (*starts.items(), *ends.items()):
        around = tracks[event["pid"], event["tid"]]
        assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in around), event
        assert starts[number]["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"


def slices_of(events: list[Event], kind: str | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and kind in (None, e["cat"])]


def arrows_of(events: list[Event]) -> Counter[tuple[str, str]]:
    """Of each arrow, the calls from which and to which it goes."""

    def at(event: Event) -> str:
        (name,) = {
            one["name"] + "@" + thread_names(events)[one["pid"], one["tid"]]
            for one in slices_of(events, "call")
            if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            and one["ts"] <= event["ts"] < max(one["ts"] + one["dur"], one["ts"] + 1)
        }
        return name

    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return Counter((at(event), at(ends[event["id"]])) for event in events if event["ph"] == "s")


def thread_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_a_trace_has_a_slice_for_every_call_and_a_thread_for_every_state() -> None:
    events = events_of(vote.run("Trees", backend=ScriptedBackend()).trace())
    assert sorted(thread_names(events).values()) == ["fork 0.0", "fork 0.1", "state 0"]
    calls = slices_of(events, "call")
    assert sorted((thread_names(events)[1, call["tid"]], call["name"]) for call in calls) == [
        ("fork 0.0", "gen('opinion')"), ("fork 0.1", "gen('opinion')"), ("state 0", "gen('end')"),
    ]  # fmt: skip
    (last,) = (call["args"] for call in calls if call["name"] == "gen('end')")
    assert last["prompt_end"].endswith("user: <Trees>; <Trees>") and last["answer"].startswith(
        "<<Trees>"
    )
    assert (
        last["completion_tokens"] == 1 and last["prompt_tokens"] > 1 and last["cached_share"] == 0
    )
    assert "error" not in last and last["source"].startswith(f"{__file__}:")


def test_arrows_lead_from_a_call_to_the_calls_that_wait_for_it() -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += rl.user("a") + rl.assistant(rl.gen("first"))
        s += rl.user("b") + rl.assistant(rl.gen("second"))
        assert s["second"]
        vote(s, "Trees")

    events = events_of(program.run(backend=ScriptedBackend()).trace())
    first, second, end = (f"gen('{name}')@state 0" for name in ("first", "second", "end"))
    opinions = [f"gen('opinion')@fork 0.{number}" for number in (0, 1)]
    in_transcript = [(first, second), *((second, opinion) for opinion in opinions), (second, end)]
    by_reading = [(opinion, end) for opinion in opinions]
    arrows = arrows_of(events)
    assert set(arrows) == {*in_transcript, *by_reading} and set(arrows.values()) == {1}


def test_calls_of_one_state_that_wait_for_each_other_do_not_overlap() -> None:
    @rl.function
    def program(s: rl.State) -> None:
        for number in range(5):
            s += rl.user("a") + rl.assistant(rl.gen(f"x{number}"))

    events = events_of(program.run(backend=ScriptedBackend()).trace())
    assert len(thread_names(events)) == 1 and len(slices_of(events, "call")) == 5


def test_tools_errors_and_cancelled_calls_are_part_of_it() -> None:
    backend = ScriptedBackend()

    @rl.function
    def program(s: rl.State) -> None:
        lost = s.copy()
        s += rl.user("one") + rl.assistant(rl.gen("number", type=int))
        with pytest.raises(rl.AnswerError):
            s["number"]
        backend.hold()
        lost += rl.user("two") + rl.assistant(rl.gen("never"))
        lost.cancel()
        backend.release()
        notes = s._run.record.tools_of("0")
        call = rl.ToolCall("owner_of", {"place": "Vidur"}, "1", owner_of, notes)
        assert call.run() == "Vidur"
        with pytest.raises(TypeError):
            rl.ToolCall("owner_of", {}, "2", owner_of, notes).run()

    state = program.run(backend=backend)
    events = events_of(state.trace())
    failed, _ = sorted(slices_of(events, "call"), key=lambda call: call["name"] == "gen('never')")
    assert "can't be read as int" in failed["args"]["error"]
    cancelled = state.calls()[1]
    assert cancelled.ended_at is None or cancelled.error == "It was cancelled."
    fine, wrong = slices_of(events, "tool")
    assert fine["name"] == wrong["name"] == "tool owner_of"
    assert fine["args"] == {} and wrong["args"]["error"].startswith("TypeError")


def test_a_run_that_goes_on_can_be_traced() -> None:
    backend = ScriptedBackend()
    backend.hold()
    traces = []

    @rl.function
    def program(s: rl.State) -> None:
        s += rl.user("one") + rl.assistant(rl.gen("x") + rl.gen("y"))
        traces.append(events_of(s.trace()))
        backend.release()

    program.run(backend=backend)
    assert [call["name"] for call in slices_of(traces[0], "call")] == ["gen('x')", "gen('y')"]


def _call(**times: Any) -> CallRecord:
    source = SourceLine("file.py", 1, "program")
    return CallRecord("x", "gen('x')", source, "0", written_at=10.0, **times)


def test_the_phases_of_a_call_fill_its_time() -> None:
    reached: dict[str, Any] = {
        "ready_at": 11.0,
        "sent_at": 12.0,
        "first_piece_at": 13.0,
        "ended_at": 15.0,
    }
    server = ServerTimes(queued_s=0.5, prefill_s=1.0, total_s=2.5)
    expected = {
        "told": (_call(**reached, times=server), ["waiting", "held", "sending", "queued", "prefill", "decoding"]),
        "streamed": (_call(**reached, streamed=True), ["waiting", "held", "first token", "decoding"]),
        "neither": (_call(**reached), ["waiting", "held", "answering"]),
        "unsent": (_call(ready_at=11.0), ["waiting", "held"]),
        "blocked": (_call(), ["waiting"]),
    }  # fmt: skip
    for call, names in expected.values():
        phases = phases_of(call, now=15.0)
        assert [phase.name for phase in phases] == names
        assert phases[0].start == 10.0 and phases[-1].end == 15.0
        assert all(one.end == other.start for one, other in itertools.pairwise(phases))


def test_a_recorder_collects_the_runs_of_all_threads_and_writes_them_after_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    vote.run("before", backend=ScriptedBackend())
    inputs = [{"topic": str(number)} for number in range(5)]
    with pytest.raises(ZeroDivisionError), rl.trace(path) as recorder:
        vote.run_batch(inputs, backend=ScriptedBackend(), progress=False)
        raise ZeroDivisionError
    vote.run("after", backend=ScriptedBackend())
    trace = recorder.trace()
    assert len(trace.runs) == 5 and len(trace.calls) == 15
    written = json.loads(path.read_text())
    assert written["otherData"]["title"] == "vote · 5 runs"
    check(written["traceEvents"])
    assert len({event["pid"] for event in written["traceEvents"]}) == 5
    assert len(slices_of(written["traceEvents"], "call")) == 15


def test_a_trace_of_text_that_is_no_unicode_can_be_saved(tmp_path: Path) -> None:
    vote.run("\ud800 topic", backend=ScriptedBackend()).trace().save(tmp_path / "out.json")
    calls = slices_of(json.loads((tmp_path / "out.json").read_text())["traceEvents"], "call")
    assert "<\ud800 topic>" in [call["args"]["answer"] for call in calls]


def test_the_text_has_a_line_a_call() -> None:
    state = vote.run("Trees", backend=ScriptedBackend())
    summary, *lines, legend = str(state.trace()).splitlines()
    tokens_in = sum(call.usage.prompt_tokens for call in state.calls())
    assert summary.startswith("vote · ") and tokens_in > 3
    assert f"3 calls · 3 branches · {tokens_in} tokens in (0 cached) · 3 out" in summary
    assert [line.split()[:2] for line in lines] == [
        ["0.0", "gen('opinion')"], ["0.1", "gen('opinion')"], ["0", "gen('end')"],
    ]  # fmt: skip
    assert "waiting" in legend
