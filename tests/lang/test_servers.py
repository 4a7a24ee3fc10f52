"""Programs against a real server, an engine in this process, and what OpenAI's API leaves of
them."""

import dataclasses
import enum
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest

import radixrt.lang as rl
from radixrt.lang.backends.protocol import ChoiceCall
from radixrt.lang.runtime.placeholder import BACKGROUND
from tests.servers import Server, free_port

SCORING_METHODS = (
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
)
FACTS = "The owner of Vidur is Noval. The port of Vidur is Teska."


@dataclasses.dataclass
class Place:
    name: str
    owner: str
    fee: int


class Kind(enum.Enum):
    PORT = "port"
    TOWER = "tower"


@pytest.fixture(params=["server", "engine"])
def full(request: pytest.FixtureRequest) -> Any:
    """The backends with everything."""
    return request.getfixturevalue("backend" if request.param == "server" else "engine")


@pytest.fixture
def openai(server: Server) -> rl.OpenAI:
    """The same server as one of which nothing is known but OpenAI's API."""
    return rl.OpenAI(f"{server.url}/v1", model="demo")


@rl.function(temperature=0, max_tokens=24)
def ask(s: rl.State, question: str = "What is the owner of Vidur?") -> None:
    s += rl.user(f"{FACTS} {question}") + rl.assistant(rl.gen("answer"))


def body_of(program: Callable[[rl.State], Any], backend: Any) -> rl.State:
    return rl.function(temperature=0, max_tokens=60)(program).run(backend=backend)


def test_everyone_gives_the_same_answer(
    backend: rl.Server, engine: rl.Engine, openai: rl.OpenAI
) -> None:
    for one in (backend, engine, openai):
        state = ask.run(backend=one)
        assert state["answer"] == "The owner of Vidur is Noval."
        assert state.finish_reason("answer") == "stop"
        (call,) = state.calls()
        assert call.usage.prompt_tokens > 20 and call.usage.completion_tokens > 5


def test_a_message_of_several_gens_is_one_message(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} What is the owner of Vidur?")
        with s.assistant():
            s += "The owner of" + rl.gen("middle", stop=" No")
            s += " No" + rl.gen("end")

    state = body_of(program, full)
    assert state["middle"] == " Vidur is" and "val" in state["end"]
    assert len(state.messages()) == 2
    assert state.messages()[1]["content"] == f"The owner of Vidur is No{state['end']}"


def test_values_have_their_types(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(
            "This is about Vidur. Its owner is Noval. Its fee is 42. Extract name, owner, fee of Vidur as JSON."
        )
        forks = s.fork(6)
        wanted = [
            rl.gen("x", schema=Place),
            rl.gen("x", type=Kind),
            rl.gen("x", type=Literal["a", "b"]),
            rl.gen("x", type=bool),
            rl.gen("x", regex="[0-9]{3}"),
            rl.gen("x", grammar='root ::= "yes" | "no"'),
        ]
        for fork, gen in zip(forks, wanted, strict=True):
            fork += rl.assistant(gen)
        s["all"] = forks.gather("x")

    place, kind, letter, truth, digits, word = body_of(program, full)["all"]
    assert place == Place("Vidur", "Noval", 42)
    assert isinstance(kind, Kind) and letter in ("a", "b") and isinstance(truth, bool)
    assert len(digits) == 3 and digits.isdigit() and word in ("yes", "no")


def test_several_answers(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += "one two " + rl.gen("x", n=3, temperature=1.0, max_tokens=4, seed=1) + rl.gen("y")

    state = body_of(program, full)
    assert len(state["x"]) == 3 and state.text().startswith("one two " + state["x"][0])


@pytest.mark.parametrize("method", SCORING_METHODS)
def test_select_finds_what_the_prompt_says(full: Any, method: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} What is the owner of Vidur?")
        choices = ["Teska", "Noval", "Bramol and more"]
        s += rl.assistant("The owner of Vidur is " + rl.select("x", choices, method) + ".")

    state = body_of(program, full)
    assert state["x"] == "Noval"
    assert state.messages()[1]["content"] == "The owner of Vidur is Noval."


@pytest.mark.parametrize(
    "prompt", ["The owner of Vidur is", f"{FACTS} " * 60 + "The owner of Vidur is"]
)
def test_select_scores_what_echo_tells(
    backend: rl.Server, engine: rl.Engine, openai: rl.OpenAI, prompt: str
) -> None:
    for unconditional in (False, True):
        call = ChoiceCall(
            prompt=prompt, choices=(" Noval", " a", " the owner of it"), unconditional=unconditional
        )
        native, local, echoed = (
            BACKGROUND.submit(one.score(call)).result() for one in (backend, engine, openai)
        )
        assert native.usage.prompt_tokens == local.usage.prompt_tokens > len(prompt) // 8
        for one, two, three in zip(native.scores, local.scores, echoed.scores, strict=True):
            assert one.logprobs == pytest.approx(three.logprobs, abs=1e-3)
            assert two.logprobs == pytest.approx(three.logprobs, abs=1e-3)
            assert len(one.unconditional) == (len(one.logprobs) if unconditional else 0)


@pytest.mark.parametrize("method", SCORING_METHODS)
def test_a_select_computes_its_prefix_once_whatever_the_method(
    server: Server, backend: rl.Server, method: Any
) -> None:
    httpx.post(f"{server.url}/flush_cache")
    before = server.info()["stats"]
    text = " ".join(f"The owner of Place{number} is Noval{number}." for number in range(30))
    choices = [" Noval", " Teska", " Bramol", " Vidur"]

    def program(s: rl.State) -> None:
        s += text + rl.select("x", choices, method)

    (call,) = body_of(program, backend).calls()
    after = server.info()["stats"]
    new = {name: after[name] - before[name] for name in ("prompt_tokens", "cached_tokens")}
    computed = new["prompt_tokens"] - new["cached_tokens"]
    assert call.usage.prompt_tokens > 300 and call.usage.cached_tokens == 0
    assert new["prompt_tokens"] > 4 * 300
    rest_of_page, of_a_choice = 16, 8
    sequences = len(choices) * (2 if method == "unconditional_likelihood_normalized" else 1)
    assert computed < call.usage.prompt_tokens + sequences * (rest_of_page + of_a_choice)


def test_forks_compute_their_prefix_once(server: Server, backend: rl.Server) -> None:
    httpx.post(f"{server.url}/flush_cache")
    before = server.info()["stats"]

    def program(s: rl.State) -> None:
        s += rl.user(
            " ".join(f"The owner of Place{number} is Noval{number}." for number in range(30))
        )
        with s.fork(4) as forks:
            for number, fork in enumerate(forks):
                fork += rl.user(f"Place{number}?") + rl.assistant(rl.gen("x", max_tokens=4))

    prompt = max(call.usage.prompt_tokens for call in body_of(program, backend).calls())
    after = server.info()["stats"]
    computed = sum(
        sign * (stats["prompt_tokens"] - stats["cached_tokens"])
        for sign, stats in ((1, after), (-1, before))
    )
    assert prompt > 300 and computed < prompt + 4 * (16 + 16)


def owner_of(place: str) -> str:
    """Get the owner of a place."""
    return f"The owner of {place} is Zekoru."


@pytest.mark.parametrize("name", ["backend", "engine", "openai"])
def test_tools_are_called_and_their_results_are_heard(
    name: str, request: pytest.FixtureRequest
) -> None:
    def program(s: rl.State) -> None:
        s += rl.user("What is the owner of Vidur?")
        s += rl.assistant(rl.gen("asked", tools=[owner_of], tool_choice="required", max_tokens=100))
        for call in s["asked"].calls:
            s += rl.tool(call, call.run())
        s += rl.assistant(rl.gen("answer", max_tokens=40))

    state = body_of(program, request.getfixturevalue(name))
    call = state["asked"].calls[0]
    assert call.name == "owner_of" and isinstance(call.arguments["place"], str)
    assert state.finish_reason("asked") == "tool_calls"
    messages = state.messages()
    assert [message["role"] for message in messages][:3] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    assert "Zekoru" in messages[2]["content"]


def test_a_program_can_read_along(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} What is the owner of Vidur?")
        s += rl.assistant(rl.gen("whole")) + rl.user("And the port?")
        s += rl.assistant(rl.gen("pieces", stream=True))
        for name in ("whole", "pieces"):
            s[f"{name} of it"] = list(s.text_iter(name))

    state = body_of(program, full)
    assert state["whole of it"] == [state["whole"]]
    assert len(state["pieces of it"]) >= 2  # drafts bring several tokens at once
    assert "".join(state["pieces of it"]) == state["pieces"]


def test_text_streams_as_it_comes(full: Any) -> None:
    stream = ask.stream(backend=full)
    pieces = list(stream.text_iter("answer"))
    assert len(pieces) >= 2 and "".join(pieces) == "The owner of Vidur is Noval."


@dataclasses.dataclass
class Town:
    name: Literal["Vidur", "Zekoru"]
    kind: Kind | None


@dataclasses.dataclass
class Journey:
    towns: tuple[Town, Town]
    ended: bool


def test_values_of_an_answer_have_the_types_of_its_parts(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} Write it as JSON.")
        s += rl.assistant(rl.gen("found", type=Journey, stream_values=True, max_tokens=400))
        s["told"] = []
        for part in s.values_iter("found"):
            s["told"].append(part)

    state = body_of(program, full)
    told, found = state["told"], state["found"]
    assert isinstance(found, Journey) and told[-1] == rl.PartialValue("", found)
    values = {part.pointer: part.value for part in told}
    for number, town in enumerate(found.towns):
        assert values[f"/towns/{number}"] == town and isinstance(town, Town)
        assert values[f"/towns/{number}/kind"] is town.kind
    assert values["/ended"] is found.ended and len(values) == len(told) == 9


def test_values_are_read_along(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} Write it as JSON.")
        s += rl.assistant(rl.gen("found", type=Town, stream_values=True, max_tokens=100))

    stream = rl.function(temperature=0)(program).stream(backend=full)
    pointers = [part.pointer for part in stream.values_iter("found")]
    assert pointers == ["/name", "/kind", ""]


def test_values_have_to_be_asked_for(backend: rl.Server) -> None:
    def program(s: rl.State) -> None:
        s += rl.user(f"{FACTS} Write it as JSON.")
        s += rl.assistant(rl.gen("found", type=Town, stream=True, max_tokens=100))
        next(s.values_iter("found"))

    with pytest.raises(rl.ProgramError, match="stream_values"):
        body_of(program, backend)
    with pytest.raises(rl.ProgramError, match="stream_values"):
        rl.gen("x", regex="a", stream_values=True)


# ---------------------------------------------------------------- what a backend lacks


@pytest.mark.parametrize(
    ("append", "feature"),
    [
        (lambda s: rl.assistant(rl.gen(regex="a")), "regular expressions"),
        (lambda s: rl.assistant(rl.gen(grammar="a")), "grammars"),
        (lambda s: rl.assistant(rl.gen(top_k=1)), "top_k"),
        (lambda s: rl.assistant(rl.gen(type=Place, stream_values=True)), "stream_values"),
        (lambda s: rl.assistant("a" + rl.gen()), "continues"),
        (lambda s: rl.assistant(rl.select("x", ["a"])), "log-probabilities"),
    ],
)
def test_what_openai_s_api_lacks_is_named(
    openai: rl.OpenAI, append: Callable[[rl.State], Any], feature: str
) -> None:
    def program(s: rl.State) -> None:
        s += rl.user("Hi")
        s += append(s)

    with pytest.raises(rl.UnsupportedFeature, match=feature) as caught:
        body_of(program, openai)
    assert caught.value.backend in str(caught.value) and caught.value.source is not None


def test_a_json_schema_and_select_in_text_are_within_openai_s_api(openai: rl.OpenAI) -> None:
    def asked(s: rl.State) -> None:
        s += rl.user("Its fee is 42. Extract name, owner, fee of Vidur as JSON.")
        s += rl.assistant(rl.gen("x", schema=Place))

    def chosen(s: rl.State) -> None:
        s += f"{FACTS} The owner of Vidur is" + rl.select("x", [" Noval", " qqqq"])

    assert isinstance(body_of(asked, openai)["x"], Place)
    assert body_of(chosen, openai)["x"] == " Noval"


def test_what_the_server_refuses_is_told_in_its_words_with_the_line(full: Any) -> None:
    def program(s: rl.State) -> None:
        s += "a" + rl.gen("x", top_p=7)

    with pytest.raises(rl.BadRequest, match=r"top_p.*test_servers\.py:\d+ in program") as caught:
        body_of(program, full)
    assert (caught.value.status, caught.value.param) == (400, "top_p")


def test_no_server_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(rl.ConnectionLost, match="radixrt serve"):
        ask.run(backend=f"http://127.0.0.1:{free_port()}")


def test_text_that_is_no_unicode_is_refused_at_its_line(full: Any) -> None:
    with pytest.raises(rl.BadRequest, match="lone surrogate") as caught:
        ask.run("\ud800", backend=full)
    assert caught.value.source is not None and caught.value.source.function == "ask"


FORKED = """
import os, sys
import radixrt.lang as rl

@rl.function(temperature=0, max_tokens=8)
def program(s):
    s += "The owner of Vidur is" + rl.gen("x")

rl.set_default_backend(sys.argv[1])
before = program.run()["x"]
child = os.fork()
if child == 0:
    os._exit(0 if program.run()["x"] == before else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status or program.run()["x"] != before)
"""


def test_a_forked_process_has_its_own_connections(server: Server) -> None:
    command = [sys.executable, "-c", FORKED, server.url]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
