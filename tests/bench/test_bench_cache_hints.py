"""``radixrt bench cache --hints``: what is said of the future, and what becomes of it, on traces
small enough for a sheet of paper."""

import math

import numpy as np
import pytest

from radixrt.base.errors import ConfigError
from radixrt.bench.cache.future import look_ahead
from radixrt.bench.cache.replay import Setup, replay
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest
from radixrt.cli.main import main

DECODE_S = 0.01


def request(
    arrival_s: float, blocks: list[int], session: int | None, *, tool: bool = False, output: int = 8
) -> TraceRequest:
    """A prompt of whole blocks and one token more, so that all of them can be found."""
    ids = np.array([*blocks, 10**6 + int(arrival_s * 8)], dtype=np.int64)
    length = BLOCK_TOKENS * len(blocks) + 8
    return TraceRequest(arrival_s, length, output, ids, session, tool)


TWO_SESSIONS = Trace(
    "two sessions",
    [
        request(0.0, [1], 7, tool=True, output=100),
        request(4.0, [2], 9),
        request(11.0, [1, 3], 7),
        request(24.0, [2, 4], 9, output=300),
        request(28.0, [5], None),
        request(51.0, [1, 3, 6], 7),
    ],
)


def test_a_program_knows_its_sessions_and_expects_its_tools() -> None:
    exact = look_ahead(TWO_SESSIONS, "exact", 0.0, DECODE_S)
    assert exact.following == [2, 3, 5, None, None, None]
    assert exact.pause_s == pytest.approx([10.0, 19.92, 39.92, 0, 0, 0])
    assert [hints.session for hints in exact.hints] == ["7", "9", "7", "9", "", "7"]
    assert [exact.is_last_of_session(n) for n in range(6)] == [False] * 3 + [True, False, True]
    said = [hints.next_use_s for hints in exact.hints]
    assert said == [*exact.pause_s[:3], None, None, None]

    human = math.sqrt(19.92 * 39.92)
    program = look_ahead(TWO_SESSIONS, "program", 0.0, DECODE_S)
    said = [hints.next_use_s for hints in program.hints]
    assert said[:3] == pytest.approx([10.0, human, human]) and said[3:] == [None] * 3

    session = look_ahead(TWO_SESSIONS, "session", 0.5, DECODE_S)
    assert all(hints.next_use_s is None for hints in session.hints)
    assert [hints.session for hints in session.hints] == ["7", "9", "7", "9", "", "7"]
    assert all(h.session == "" for h in look_ahead(TWO_SESSIONS, "none", 0.5, DECODE_S).hints)


def test_what_is_said_of_tools_is_wrong_by_as_much_as_asked_for() -> None:
    calls = Trace("calls", [request(10.0 * n, [n], 1, tool=True) for n in range(4000)])
    future = look_ahead(calls, "program", 0.5, DECODE_S)
    said = [hints.next_use_s or math.nan for hints in future.hints[:-1]]
    errors = np.log(np.array(said) / np.array(future.pause_s[:-1]))
    assert np.mean(errors) == pytest.approx(0, abs=0.03)
    assert np.std(errors) == pytest.approx(0.5, abs=0.03)


def test_in_a_closed_loop_the_next_request_waits_for_the_answer() -> None:
    trace = Trace(
        "one session", [request(0.0, [1, 2], 1, output=16), request(10.0, [1, 2, 3, 4], 1)]
    )
    run = replay(trace, Setup(pool_tokens=64 * BLOCK_TOKENS, closed_loop=True))
    first_s = 1032 / 100_000 + 0.08  # two symbols of 8 tokens, the first with the prompt
    pause_s = 10 - 16 * DECODE_S
    second_s = 1032 / 100_000
    assert run.cached_tokens == [0, 2 * BLOCK_TOKENS]
    assert run.duration_s == pytest.approx(first_s + pause_s + second_s)
    assert run.ttft_s == pytest.approx([1032 / 100_000, second_s])


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize(("hints", "found"), [("none", 1), ("session", 4), ("exact", 4)])
def test_a_session_that_has_ended_makes_room_for_one_that_goes_on(
    policy: str, hints: str, found: int
) -> None:
    """Twelve pages. One session waits with four, another comes with four and ends, a stranger needs
    seven, three of them of one of the two; the first goes on."""
    trace = Trace(
        "ends",
        [
            request(0.0, [1, 2, 3, 4], 1),
            request(10.0, [11, 12, 13, 14], 2),
            request(20.0, [21, 22, 23, 24, 25, 26], 3),
            request(30.0, [1, 2, 3, 4], 1),
        ],
    )
    setup = Setup(12 * BLOCK_TOKENS, policy, hints=hints)  # type: ignore[arg-type]
    assert replay(trace, setup).cached_tokens[-1] == found * BLOCK_TOKENS


def tools_and_humans(seed: int) -> Trace:
    """Sessions whose prompts grow, with short pauses for tools and long ones for humans."""
    random = np.random.default_rng(seed)
    requests = []
    for session in range(30):
        now, blocks = float(random.uniform(0, 400)), []
        for turn in range(int(random.integers(2, 12))):
            blocks += [1000 * session + 50 * turn + i for i in range(int(random.integers(1, 9)))]
            tool = bool(random.random() < 0.7)
            requests.append(request(now, list(blocks), session, tool=tool))
            now += float(random.exponential(5 if tool else 90)) + 1
    return Trace("tools", sorted(requests, key=lambda r: r.arrival_s))


@pytest.mark.parametrize("closed_loop", [False, True])
def test_who_tells_more_finds_more_and_the_same_each_time(closed_loop: bool) -> None:
    trace = tools_and_humans(1)

    def hits(hints: str) -> int:
        setup = Setup(80 * BLOCK_TOKENS, "lru", hints=hints, closed_loop=closed_loop)  # type: ignore[arg-type]
        first, second = replay(trace, setup), replay(trace, setup)
        assert first == second
        assert sorted(first.order) == list(range(len(trace.requests)))
        return sum(first.cached_tokens)

    none, program, exact = hits("none"), hits("program"), hits("exact")
    assert none < program < exact


def test_hints_for_a_trace_without_sessions_are_refused(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace("anonymous", [request(0.0, [1], None)])
    with pytest.raises(ConfigError, match="anonymous has no sessions"):
        look_ahead(trace, "session", 0.5, DECODE_S)
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(SystemExit):
        main(["bench", "cache", str(path), "--hints", "program"])
    assert "--hints none" in capsys.readouterr().err
