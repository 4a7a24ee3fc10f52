"""What a program may rely on, whatever answers it: order, isolation, laziness, errors with their
lines."""

import asyncio
import dataclasses
import inspect
import re
import threading
import time
from typing import Any

import pytest

import radixrt.lang as rl
from tests.lang.scripted_backend import ScriptedBackend


@pytest.fixture
def scripted() -> ScriptedBackend:
    return ScriptedBackend()


def run(program: Any, backend: ScriptedBackend, **arguments: Any) -> rl.State:
    return rl.function(program).run(backend=backend, **arguments)


def test_text_goes_on_from_what_the_model_said(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x") + "b"
        s += rl.gen("y")

    state = run(program, scripted)
    assert state["x"] == "<a>" and state["y"] == "<a<a>b>"
    assert state.text() == "a<a>b<a<a>b>"


def test_messages_are_what_the_roles_say(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        s += rl.system("be") + rl.user("hi") + rl.assistant("well, " + rl.gen("x") + "!")
        with s.user():
            s += "a"
            s += "b"

    state = run(program, scripted)
    assert state.messages() == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "well, <well, >!"},
        {"role": "user", "content": "ab"},
    ]
    (call,) = scripted.calls
    assert call.continues and call.prompt[-1] == {"role": "assistant", "content": "well, "}


def test_an_image_is_a_part_of_a_users_message(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        s += rl.user("Look: " + rl.image(b"GIF89a") + "What is it?")
        s += rl.assistant(rl.gen("answer"))

    state = run(program, scripted)
    (call,) = scripted.calls
    url = {"url": "data:image/*;base64,R0lGODlh"}
    assert call.prompt[0] == {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look: "},
            {"type": "image_url", "image_url": url},
            {"type": "text", "text": "What is it?"},
        ],
    }
    assert "Look: [image]What is it?" in str(state.text())


def test_a_gen_that_begins_the_message_continues_nothing(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        s += rl.user("hi") + rl.assistant(rl.gen("x") + " and " + rl.gen("y"))

    run(program, scripted)
    first, second = scripted.calls
    assert not first.continues and [m["role"] for m in first.prompt] == ["user"]
    assert second.continues and second.prompt[-1]["content"] == "<hi> and "


def test_a_program_goes_on_until_it_needs_a_value(scripted: ScriptedBackend) -> None:
    scripted.hold()
    reached: list[bool] = []

    def program(s: rl.State) -> str:
        s += "a" + rl.gen("x")
        reached.append(True)
        scripted.release()
        return s["x"]

    assert run(program, scripted).result == "<a>" and reached


def test_forks_share_the_past_and_nothing_else(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> tuple[list[str], list[str]]:
        s += "a" + rl.gen("x")
        one, two = s.fork(2)
        one += "1" + rl.gen("y")
        two += "2" + rl.gen("y")
        s += "s"
        with pytest.raises(rl.UnknownVariable, match=r"'y'.*'x'"):
            s["y"]
        return [one["x"], one["y"], one.text()], [two["x"], two["y"], two.text()]

    one, two = run(program, scripted).result
    assert one == ["<a>", "<a<a>1>", "a<a>1<a<a>1>"]
    assert two == ["<a>", "<a<a>2>", "a<a>2<a<a>2>"]


def test_join_keeps_the_order_of_the_forks_whoever_ends_first() -> None:
    order = ["1", "2", "0"]
    finished: list[str] = []

    class Uneven(ScriptedBackend):
        async def generate(self, call):
            word = call.prompt[-1]
            while order[len(finished)] != word:
                await asyncio.sleep(0.001)
            finished.append(word)
            async for piece in super().generate(call):
                yield piece

    def program(s: rl.State) -> None:
        s += "x"
        with s.fork(3) as forks:
            for number, fork in enumerate(forks):
                fork += str(number) + rl.gen("y")

    state = run(program, Uneven())
    assert finished == order
    assert state["y"] == ["<x0>", "<x1>", "<x2>"]


def test_join_gives_what_the_branches_made_in_the_place_of_what_they_inherited(
    scripted: ScriptedBackend,
) -> None:
    def program(s: rl.State) -> None:
        s["kept"] = "k"
        for number in range(2):
            with s.fork(2) as forks:
                for fork in forks:
                    fork += str(number) + rl.gen("y")
                forks[0]["half"] = number

    state = run(program, scripted)
    assert state["y"] == ["<1>", "<1>"] and state["kept"] == "k" and "half" not in state


def test_an_open_message_can_be_forked(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> list[str]:
        s += rl.user("q")
        with s.assistant():
            s += "Tip: "
            forks = s.fork(2)
            forks[0] += rl.gen("tip")
            forks[1] += "b" + rl.gen("tip")
            forks[0] += rl.user("more")
        return [fork.messages()[1]["content"] for fork in forks]

    assert run(program, scripted).result == ["Tip: <Tip: >", "Tip: b<Tip: b>"]


def test_several_answers_are_a_list_and_the_state_goes_on_with_the_first(
    scripted: ScriptedBackend,
) -> None:
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x", n=3)

    state = run(program, scripted)
    assert state["x"] == ["<a>", "<a>1", "<a>2"] and state.text() == "a<a>"


def test_functions_called_with_a_state_are_part_of_it(scripted: ScriptedBackend) -> None:
    @rl.function
    def inner(s: rl.State, word: str) -> str:
        s += word + rl.gen("x")
        return s["x"]

    @rl.function
    def outer(s: rl.State) -> str:
        s += "o"
        return inner(s, word="i")

    assert outer.run(backend=scripted).result == "<oi>"
    with pytest.raises(rl.ProgramError, match=r"inner\.run"):
        inner(word="x", state="no state")


def test_a_program_run_inside_another_has_its_backend_and_no_other_s_state(
    scripted: ScriptedBackend,
) -> None:
    @rl.function
    def inner(s: rl.State) -> None:
        s += "i" + rl.gen("x")

    def program(s: rl.State) -> str:
        s += "o"
        return inner.run().text()

    state = run(program, scripted)
    assert state.result == "i<i>" and state.text() == "o" and "x" not in state


def test_settings_come_from_the_gen_then_the_run_then_the_function(
    scripted: ScriptedBackend,
) -> None:
    @rl.function(temperature=0.1, max_tokens=1, top_p=0.5)
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x", temperature=0.3)

    program.run(backend=scripted, sampling=rl.Sampling(temperature=0.2, max_tokens=2))
    given = scripted.calls[0].sampling
    assert (given.temperature, given.max_tokens, given.top_p) == (0.3, 2, 0.5)


def test_the_first_settings_of_gen_need_no_names(scripted: ScriptedBackend) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x", 64, 0.5, ["b", "c"], seed=7)

    program.run(backend=scripted)
    given = scripted.calls[0].sampling.given()
    assert given == {"max_tokens": 64, "temperature": 0.5, "stop": ("b", "c"), "seed": 7}


def test_gen_has_every_sampling_setting() -> None:
    named = inspect.signature(rl.gen).parameters.keys()
    assert {field.name for field in dataclasses.fields(rl.Sampling)} <= named


def test_what_is_appended_to_forks_is_appended_to_each_branch(scripted: ScriptedBackend) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += "a"
        forks = s.fork(2)
        forks[1] += "b"
        forks += rl.gen("x")
        s["all"] = forks.gather("x")

    assert program.run(backend=scripted)["all"] == ["<a>", "<ab>"]
    assert len(scripted.calls) == 2


# ---------------------------------------------------------------- misuse

MISUSES = {
    "text outside of roles": (lambda: rl.user("a"), lambda: "b", "rl.user"),
    "gen outside of roles": (lambda: rl.user("a"), lambda: rl.gen("x"), "rl.assistant"),
    "roles in plain text": (lambda: "a", lambda: rl.user("b"), "plain text"),
    "gen in a user's message": (lambda: "", lambda: rl.user(rl.gen("x")), "rl.assistant"),
    "a message in a message": (lambda: "", lambda: rl.user(rl.user("x")), "inside another"),
    "an image in plain text": (lambda: "", lambda: rl.image(b"GIF89a"), "rl.user"),
    "an image that is not there": (lambda: "", lambda: rl.user(rl.image("/no.png")), "No such file"),
    "a number": (lambda: "", lambda: 5, "str"),
    "two constraints": (lambda: "", lambda: rl.gen(regex="a", type=int), "regex, type"),
    "an unknown setting": (lambda: "", lambda: rl.gen(temprature=1), "temprature"),
    "a function's unknown setting": (lambda: "", lambda: rl.function(temprature=1), "function has no setting"),
    "the choice of no tool": (lambda: "", lambda: rl.gen(tools=[run], tool_choice="walk"), "none, run, not 'walk'"),
    "tools in plain text": (lambda: "a", lambda: rl.gen(tools=[run]), "conversation"),
    "no choices": (lambda: "", lambda: rl.select("x", []), "choices"),
    "an unknown method": (lambda: "", lambda: rl.select("x", ["a"], "best"), "greedy"),
    "a type without a schema": (lambda: "", lambda: rl.gen("x", type=threading.Lock), "JSON schema"),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_an_error_at_its_line_that_says_what_to_change(
    misuse: str, scripted: ScriptedBackend
) -> None:
    first, second, advice = MISUSES[misuse]

    def program(s: rl.State) -> None:
        if first():
            s += first()
        with pytest.raises(rl.ProgramError, match=advice):
            s += second()

    run(program, scripted)
    assert scripted.calls == []


def test_a_gen_in_the_block_of_a_user_is_an_error(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        with s.user(), pytest.raises(rl.ProgramError, match=r"rl\.assistant"):
            s += rl.gen("x")

    run(program, scripted)


# ---------------------------------------------------------------- failures


class Failing(ScriptedBackend):
    async def generate(self, call):
        if "bad" in str(call.prompt):
            raise rl.BadRequest("There is something bad in it.", 400, "prompt")
        async for piece in super().generate(call):
            yield piece


def test_an_error_in_a_branch_names_the_line_of_its_gen() -> None:
    def program(s: rl.State) -> None:
        forks = s.fork(2)
        forks[0] += "good" + rl.gen("x")
        forks[1] += "bad" + rl.gen("x")  # the line at fault
        assert forks[0]["x"] == "<good>"
        forks[1]["x"]

    with pytest.raises(rl.BadRequest) as caught:
        run(program, Failing())
    first_line = program.__code__.co_firstlineno
    assert f"{__name__.split('.')[-1]}.py:{first_line + 3} in program" in str(caught.value)
    (note,) = caught.value.__notes__
    assert "# the line at fault" in note and f"line {first_line + 3}" in note


def test_what_goes_on_from_a_failed_gen_fails_with_the_first_error() -> None:
    def program(s: rl.State) -> None:
        s += "bad" + rl.gen("x")
        s += "more" + rl.gen("y")
        with pytest.raises(rl.BadRequest, match="program") as caught:
            s["y"]
        assert caught.value.__notes__[0].count("gen('x')") == 1
        s["x"]

    with pytest.raises(rl.BadRequest, match="something bad"):
        run(program, Failing())


def test_a_failure_that_the_program_never_looked_at_is_not_lost() -> None:
    def program(s: rl.State) -> None:
        s += "bad" + rl.gen("x")

    with pytest.raises(rl.BadRequest, match="something bad"):
        run(program, Failing())


def test_a_failure_that_the_program_dealt_with_is_over() -> None:
    def program(s: rl.State) -> str:
        fork = s.copy()
        fork += "bad" + rl.gen("x")
        try:
            return fork["x"]
        except rl.BadRequest:
            s += "good" + rl.gen("x")
            return s["x"]

    assert run(program, Failing()).result == "<good>"


def test_a_cancelled_branch_takes_along_what_waits_for_it_and_nothing_else(
    scripted: ScriptedBackend,
) -> None:
    scripted.hold()

    def program(s: rl.State) -> None:
        one, two = s.fork(2)
        one += "1" + rl.gen("x")
        child = one.copy()
        child += "c" + rl.gen("z")
        two += "2" + rl.gen("x")
        one.cancel()
        with pytest.raises(rl.Cancelled, match=r"gen\('x'\)"):
            one["x"]
        scripted.release()
        with pytest.raises(rl.Cancelled, match=r"gen\('x'\)"):
            child["z"]
        assert two["x"] == "<2>"

    run(program, scripted)
    assert len(scripted.calls) == 2 and scripted.running == 0


def test_an_exception_of_the_program_cancels_what_it_has_under_way(
    scripted: ScriptedBackend,
) -> None:
    scripted.hold()

    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x")
        while not scripted.running:
            time.sleep(0.001)
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        run(program, scripted)
    wait_until(lambda: scripted.running == 0)


# ---------------------------------------------------------------- async and streams


def test_async_programs_run_everywhere(scripted: ScriptedBackend) -> None:
    @rl.function
    async def program(s: rl.State, word: str) -> str:
        s += word + rl.gen("x")
        return await s.value("x")

    async def both() -> list[str]:
        states = await asyncio.gather(*(program.arun(word, backend=scripted) for word in "ab"))
        return [state.result for state in states]

    assert program.run("c", backend=scripted).result == "<c>"
    assert asyncio.run(both()) == ["<a>", "<b>"]
    results = program.run_batch([{"word": "d"}, {"word": "e"}], backend=scripted, progress=False)
    assert [state.result for state in results] == ["<d>", "<e>"]


def test_plain_programs_can_be_awaited_and_cancelled(scripted: ScriptedBackend) -> None:
    @rl.function
    def program(s: rl.State) -> str:
        s += "a" + rl.gen("x")
        return s["x"]

    async def main() -> None:
        assert (await program.arun(backend=scripted)).result == "<a>"
        scripted.hold()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(program.arun(backend=scripted), 0.05)

    asyncio.run(main())
    wait_until(lambda: scripted.running == 0)


def test_what_an_async_program_has_not_looked_at_is_raised_at_its_end() -> None:
    @rl.function
    async def program(s: rl.State) -> None:
        s += "a" + rl.gen("x", type=int)  # answered after the program's own code has ended

    with pytest.raises(rl.AnswerError, match="can't be read as int"):
        program.run(backend=ScriptedBackend())


def test_an_async_program_gathers_and_reads_along(scripted: ScriptedBackend) -> None:
    @rl.function
    async def program(s: rl.State) -> tuple[list[str], list[str]]:
        forks = s.fork(3)
        for number, branch in enumerate(forks):
            branch += str(number) + rl.gen("x")
        s += "a" + rl.gen("y", stream=True)
        pieces = [piece async for piece in s.text_aiter("y")]
        return await forks.gather_async("x"), pieces

    assert program.run(backend=scripted).result == (["<0>", "<1>", "<2>"], list("<a>"))


def test_a_stream_gives_the_text_in_order_as_it_comes(scripted: ScriptedBackend) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += "ab" + rl.gen("x")
        s += "c" + rl.gen("y")

    stream = program.stream(backend=scripted)
    pieces = list(stream)
    assert "".join(pieces) == "ab<ab>c<ab<ab>c>" == stream.state.text()
    assert pieces[:3] == ["ab", "<", "a"]
    assert list(program.stream(backend=scripted).text_iter("y")) == list("<ab<ab>c>")

    async def main() -> tuple[list[str], list[str]]:
        of_y = program.astream(backend=scripted).text_aiter("y")
        return [piece async for piece in program.astream(backend=scripted)], [y async for y in of_y]

    assert asyncio.run(main()) == (pieces, list("<ab<ab>c>"))


def test_a_stream_shows_text_before_the_answer_ends(scripted: ScriptedBackend) -> None:
    scripted.hold()

    @rl.function
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x")

    seen = []
    for piece in program.stream(backend=scripted):
        seen.append(piece)
        if piece == ">":
            scripted.release()
    assert seen == ["a", "<", "a", ">"]


def test_leaving_a_stream_cancels_the_program(scripted: ScriptedBackend) -> None:
    scripted.hold()

    @rl.function
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x")

    for piece in program.stream(backend=scripted):
        if piece == ">":
            break
    wait_until(lambda: scripted.running == 0)


def test_a_stream_raises_what_ended_the_program(scripted: ScriptedBackend) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += "a"
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        list(program.stream(backend=scripted))
    with pytest.raises(ValueError, match="own"):
        list(program.stream(backend=scripted).text_iter("x"))


def test_records_tell_what_each_branch_asked_for(scripted: ScriptedBackend) -> None:
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x")
        forks = s.fork(2)
        forks[1] += "b" + rl.gen("y")

    first, second = run(program, scripted).calls()
    assert (first.what, first.branch) == ("gen('x')", "0")
    assert (second.what, second.branch) == ("gen('y')", "0.1")
    assert first.written_at <= first.sent_at <= first.first_piece_at <= first.ended_at
    assert first.ended_at <= second.sent_at and first.usage.completion_tokens == 1
    assert re.search(r"test_states\.py:\d+ in program", str(first.source))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
