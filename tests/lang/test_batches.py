"""Many runs side by side: in order, apart from each other, and those that begin alike one after
another."""

import asyncio
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import radixrt.lang as rl
from bench import children
from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.runtime.admission import PrefixOrder
from tests.lang.scripted_backend import ScriptedBackend, last_words

ROOT = Path(__file__).parents[2]


@rl.function
def echo(s: rl.State, word: str) -> None:
    s += word + rl.gen("x")
    if word == "bad":
        raise ValueError("the program's own")


def test_results_come_in_the_order_of_the_inputs() -> None:
    words = [f"word {number}" for number in random.Random(1).sample(range(200), 200)]
    inputs = [{"word": word} for word in words]
    results = echo.run_batch(inputs, backend=ScriptedBackend(), progress=False)
    assert [result["x"] for result in results] == [f"<{word}>" for word in words]


def test_one_failure_does_not_lose_the_others() -> None:
    inputs = [{"word": word} for word in ("a", "bad", "c")]
    one, failed, three = echo.run_batch(inputs, backend=ScriptedBackend(), progress=False)
    assert (one["x"], three["x"]) == ("<a>", "<c>") and one.error is None
    assert isinstance(failed.error, ValueError)
    with pytest.raises(ValueError, match="own"):
        failed["x"]


def test_a_batch_in_an_event_loop_gives_the_same_and_ends_with_whoever_waits_for_it() -> None:
    backend = ScriptedBackend()
    inputs = [{"word": word} for word in ("a", "bad", "c")]

    async def main() -> None:
        one, failed, three = await echo.arun_batch(inputs, backend=backend, progress=False)
        assert (one["x"], three["x"]) == ("<a>", "<c>") and isinstance(failed.error, ValueError)
        assert "x" in failed.state
        backend.hold()
        with pytest.raises(TimeoutError):
            batch = echo.arun_batch(inputs, max_concurrency=1, backend=backend, progress=False)
            await asyncio.wait_for(batch, 0.1)

    asyncio.run(main())
    end = time.monotonic() + 5
    while backend.running and time.monotonic() < end:
        time.sleep(0.01)
    assert backend.running == 0


@pytest.mark.parametrize("concurrency", [1, 5])
def test_no_more_runs_than_asked_for_have_calls_under_way(concurrency: int) -> None:
    backend = ScriptedBackend()
    inputs = [{"word": str(number)} for number in range(40)]
    echo.run_batch(inputs, max_concurrency=concurrency, backend=backend, progress=False)
    assert len(backend.calls) == 40 and backend.most_running <= concurrency
    backend = ScriptedBackend()
    echo.run_batch(inputs, num_threads=concurrency, backend=backend, progress=False)
    assert backend.most_running <= concurrency


@rl.function
def nested(s: rl.State, word: str) -> None:
    s["x"] = echo.run(word)["x"]


@rl.function
def nested_batch(s: rl.State, word: str) -> None:
    inputs = [{"word": word + end} for end in "abc"]
    s["x"] = [state["x"] for state in echo.run_batch(inputs, progress=False)]


@rl.function
async def nested_async(s: rl.State, word: str) -> None:
    s["x"] = (await echo.arun(word))["x"]


@pytest.mark.parametrize("program", [nested, nested_async])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_programs_that_runs_run_take_their_places(program: rl.Function, concurrency: int) -> None:
    backend = ScriptedBackend()
    inputs = [{"word": str(number)} for number in range(20)]
    results = program.run_batch(
        inputs, max_concurrency=concurrency, backend=backend, progress=False
    )
    assert [result["x"] for result in results] == [f"<{i['word']}>" for i in inputs]
    assert len(backend.calls) == 20 and backend.most_running <= concurrency


def test_batches_that_runs_run_take_their_places() -> None:
    backend = ScriptedBackend()
    inputs = [{"word": str(number)} for number in range(8)]
    results = nested_batch.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
    assert [r["x"] for r in results] == [[f"<{i['word']}{end}>" for end in "abc"] for i in inputs]
    runs = [last_words(call.prompt)[:1] for call in backend.calls]
    assert sum(one != other for one, other in itertools.pairwise(runs)) == 7  # one run at a time


@pytest.mark.parametrize("num_threads", [1, 4])
def test_no_more_programs_than_threads_are_under_way(num_threads: int) -> None:
    under_way: set[str] = set()
    most: list[int] = []

    @rl.function
    def program(s: rl.State, word: str) -> None:
        under_way.add(word)
        most.append(len(under_way))
        s += word + rl.gen("x")
        s += s["x"] + rl.gen("y")
        _ = s["y"]
        under_way.remove(word)

    inputs = [{"word": str(number)} for number in range(40)]
    program.run_batch(inputs, num_threads=num_threads, backend=ScriptedBackend(), progress=False)
    assert max(most) <= num_threads


def test_a_program_that_fails_ends_those_it_began() -> None:
    backend = ScriptedBackend()
    backend.hold()
    streams = []

    @rl.function
    def program(s: rl.State) -> None:
        streams.append(echo.stream("a"))
        while not backend.calls:
            time.sleep(0.001)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        program.run(backend=backend)
    with pytest.raises(rl.Cancelled):
        list(streams[0])


def test_runs_that_begin_alike_go_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.lang.runtime.admission.SETTLING_S", 30.0)  # until all have come
    backend = ScriptedBackend()
    documents = [f"document {letter} " * 20 for letter in "abcd"]
    inputs = [{"word": documents[number % 4] + str(number)} for number in range(24)]
    results = echo.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
    sent = [last_words(call.prompt)[:12] for call in backend.calls]
    assert sum(one != other for one, other in itertools.pairwise(sent)) == 3
    assert [last_words(call.prompt) for call in backend.calls] != [i["word"] for i in inputs]
    assert [result["x"] for result in results] == [f"<{i['word']}>" for i in inputs]


@rl.function
def twice(s: rl.State, word: str) -> None:
    s += word + rl.gen("x")
    s += rl.gen("y")


def most_running(program: rl.Function, cache_tokens: int | None, words: list[str]) -> int:
    """The highest number of calls under way at a time, of a batch whose cache holds so many
    tokens."""
    backend = ScriptedBackend()
    backend.capacity = cache_tokens
    program.run_batch([{"word": word} for word in words], backend=backend, progress=False)
    return backend.most_running


LONG_WORDS = [f"{number} " * 500 for number in range(8)]
"""Of 251 tokens each, by the scripted backend's count."""


def test_runs_that_come_back_to_more_than_the_cache_holds_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixrt.lang.runtime.admission.RESTING_S", 30.0)
    assert most_running(twice, 1000, LONG_WORDS) <= 2
    assert most_running(twice, 10_000, LONG_WORDS) > 2


def test_one_run_may_always_be_active_however_small_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixrt.lang.runtime.admission.RESTING_S", 30.0)
    assert most_running(twice, 100, LONG_WORDS) == 1


def test_a_cache_of_unknown_size_holds_up_nobody() -> None:
    assert most_running(twice, None, LONG_WORDS) > 2


def test_what_runs_share_takes_room_once() -> None:
    """Once runs have ended: the first guess counts whole prompts."""
    words = ["shared " * 200 + str(number) for number in range(60)]
    backend = ScriptedBackend(lambda prompt: "x")
    backend.capacity = 1000
    backend.caches_prefixes = True
    twice.run_batch([{"word": word} for word in words], backend=backend, progress=False)
    assert backend.most_running > 3


def test_a_run_in_a_tool_makes_way_for_another() -> None:
    """Six runs that rest until all do, of which the cache holds one."""
    all_rest = threading.Barrier(6)

    @rl.function
    def program(s: rl.State, word: str) -> None:
        s += word + rl.gen("x")
        assert s["x"]
        all_rest.wait(timeout=20)
        s += rl.gen("y")

    backend = ScriptedBackend(lambda prompt: "x")
    backend.capacity = 300
    inputs = [{"word": word} for word in LONG_WORDS[:6]]
    states = program.run_batch(inputs, backend=backend, progress=False)
    assert len(states) == 6 and all(state["y"] for state in states)


def test_each_program_of_a_batch_runs_once() -> None:
    started: list[str] = []

    @rl.function
    def program(s: rl.State, word: str) -> None:
        started.append(word)
        if word != "silent":
            s += word + rl.gen("x")
            s += s["x"] + rl.gen("y")

    words = ["a", "silent", "b"]
    inputs = [{"word": word} for word in words]
    program.run_batch(inputs, max_concurrency=1, backend=ScriptedBackend(), progress=False)
    assert sorted(started) == sorted(words)


def test_inputs_that_are_no_list_of_arguments_are_refused() -> None:
    for inputs in ({"word": "a"}, ["a"], "a"):
        with pytest.raises(rl.ProgramError, match="list of arguments"):
            echo.run_batch(inputs, backend=ScriptedBackend())  # type: ignore[arg-type]
    assert echo.run_batch([], backend=ScriptedBackend()) == []


def test_inputs_may_come_from_a_generator() -> None:
    inputs = ({"word": word} for word in "ab")
    states = echo.run_batch(inputs, backend=ScriptedBackend(), progress=False)
    assert [state["x"] for state in states] == ["<a>", "<b>"]


@pytest.mark.parametrize("setting", ["max_concurrency", "num_threads"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_batch_in_which_no_run_may_go_is_refused(setting: str, number: int) -> None:
    with pytest.raises(rl.ProgramError, match="at least 1"):
        echo.run_batch([{"word": "a"}], backend=ScriptedBackend(), **{setting: number})


def test_whatever_is_read_of_a_failed_run_raises_its_error() -> None:
    (failed,) = echo.run_batch([{"nothing": "a"}], backend=ScriptedBackend(), progress=False)
    reads = (
        lambda: failed["x"], lambda: "x" in failed, lambda: failed.text(), lambda: failed.messages(),
        lambda: failed.result, lambda: failed.variables(), lambda: failed.finish_reason("x"), lambda: failed.trace(),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(TypeError, match="nothing"):
            read()
    with pytest.raises(AttributeError, match="txet"):
        failed.txet()


INTERRUPTED = """
import threading, time
import radixrt.lang as rl
from tests.lang.scripted_backend import ScriptedBackend

backend = ScriptedBackend()

@rl.function
def program(s, word):
    s += word + rl.gen("x")

program.run_batch([{"word": "first"}], backend=backend)  # nothing is imported when the signal comes
backend.hold()

def tell():
    while backend.running < 4:
        time.sleep(0.005)
    print("running", flush=True)

threading.Thread(target=tell, daemon=True).start()
try:
    program.run_batch([{"word": str(n)} for n in range(8)], max_concurrency=4, backend=backend)
except KeyboardInterrupt:
    end = time.monotonic() + 10
    while backend.running and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.2)  # no other call begins
    print("interrupted", backend.running, len(backend.calls))
"""


def test_ctrl_c_cancels_a_batch() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with children.running(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert output == "interrupted 0 5\n"


# ---------------------------------------------------------------- the order alone


def test_the_order_begins_with_what_shares_most_and_walks_to_the_nearest() -> None:
    order = PrefixOrder()
    for prompt in ("b1", "aaa1", "c", "aaa2", "aab", "b2"):
        order.add(prompt, prompt)
    taken = [order.pop() for _ in range(len(order))]
    assert taken[:3] == ["aaa1", "aaa2", "aab"]
    assert abs(taken.index("b1") - taken.index("b2")) == 1
    with pytest.raises(IndexError):
        order.pop()


def test_the_order_changes_documents_as_seldom_as_possible() -> None:
    random_numbers = random.Random(7)
    prompts = [f"{random_numbers.randrange(9)}" * 50 + f"{n}" for n in range(120)]
    order = PrefixOrder()
    for key, prompt in enumerate(prompts):
        order.add(prompt, key)
    taken = [prompts[order.pop()][0] for _ in prompts]  # type: ignore[index]
    changes = sum(one != other for one, other in itertools.pairwise(taken))
    assert changes == len(set(taken)) - 1


def test_who_has_gone_is_not_taken() -> None:
    order = PrefixOrder()
    order.add("a", 1)
    order.add("a", 2)
    order.remove(1)
    order.remove(3)
    assert order.pop() == 2 and len(order) == 0


def test_shared_length_is_that_of_the_common_beginning() -> None:
    random_numbers = random.Random(3)
    for _ in range(500):
        one, other = (
            "".join(random_numbers.choices("ab", k=random_numbers.randrange(9))) for _ in "12"
        )
        expected = 0
        while expected < min(len(one), len(other)) and one[expected] == other[expected]:
            expected += 1
        assert common_prefix_length(one, other) == expected
