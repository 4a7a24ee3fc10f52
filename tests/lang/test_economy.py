"""A conversation's text travels once, whatever comes of it, and the answers are what they would be without that."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import radixrt.lang as rl
from radixrt.lang.backends.kept_prompts import BLOCK_CHARS, SHORTEST_CHARS, KeptPrompts
from radixrt.lang.backends.sent_once import SENT_AHEAD_CHARS
from tests.servers import Server

FACTS = "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. "
BOOK = FACTS * 40
"""Longer than what is worth to be kept."""
assert len(BOOK) > SHORTEST_CHARS


class Counted(rl.Server):
    """A server, and the bodies of what is sent to it."""

    def __init__(self, url: str, forget: bool = False, change_keys: bool = False) -> None:
        """
        Args:
            forget: have nothing kept.
            change_keys: with every request, so that nothing that was kept belongs to the next one.
        """
        super().__init__(url)
        self.bodies: list[dict[str, Any]] = []
        """Of calls of the model."""
        self.posted: list[tuple[str, dict[str, Any]]] = []
        """All requests that do not stream, and their paths."""
        answer = self._http.answer

        def use_new_key() -> None:
            if change_keys and self._http._client is not None:
                number = len(self.bodies) + len(self.posted)
                self._http._client.headers["authorization"] = f"Bearer {number}"

        def counted(path: str, body: dict[str, Any]) -> Any:
            self.bodies.append(body)
            if forget:
                body = {name: value for name, value in body.items() if name != "keep"}
            use_new_key()
            return answer(path, body)

        post = self._http.post

        def counted_post(path: str, body: dict[str, Any], is_patient: bool = True) -> Any:
            if path != "/v1/cache/release":
                self.posted.append((path, body))
            if path == "/score_choices":
                use_new_key()
            return post(path, body, is_patient)

        self._http.answer = counted  # type: ignore[method-assign]
        self._http.post = counted_post  # type: ignore[method-assign]

    @property
    def sizes(self) -> list[int]:
        return [len(msgspec.json.encode(body)) for body in self.bodies]


@rl.function(temperature=0, max_tokens=12)
def chat(s: rl.State, turns: int) -> None:
    s += rl.system(BOOK)
    for number in range(turns):
        s += rl.user(f"What is the owner of Vidur, number {number}?")
        s += rl.assistant(rl.gen(f"answer {number}"))


@rl.function(temperature=0, max_tokens=6)
def story(s: rl.State, turns: int) -> None:
    s += BOOK
    for number in range(turns):
        s += f" Part {number}: the owner of Vidur is" + rl.gen(f"part {number}")


@rl.function(temperature=0, max_tokens=16)
def branches(s: rl.State) -> None:
    s += rl.system(BOOK) + rl.user("What is the port of Vidur?")
    with s.assistant():
        s += "The port of" + rl.gen("port", stop=".")
        s += ". The owner of" + rl.gen("owner", stop=".")
    with s.fork(3) as forks:
        for number, fork in enumerate(forks):
            fork += rl.user(f"Once more, {number}: what is the fee of Vidur?")
            fork += rl.assistant(rl.gen("fee", n=1 + number % 2))


def owner_of(place: str) -> str:
    """Get the owner of a place."""
    return f"The owner of {place} is Zekoru."


@rl.function(temperature=0, max_tokens=60)
def agent(s: rl.State) -> None:
    s += rl.system(BOOK) + rl.user("What is the owner of Vidur?")
    s += rl.assistant(rl.gen("asked", tools=[owner_of], tool_choice="required"))
    for call in s["asked"].calls:
        s += rl.tool(call, call.run())
    s += rl.assistant(rl.gen("answer"))


def values_of(state: rl.State) -> dict[str, Any]:
    return {name: state[name] for name in state.variables()}


@pytest.mark.parametrize(
    ("program", "arguments"), [(chat, {"turns": 4}), (story, {"turns": 4}), (branches, {}), (agent, {})]
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_answers_are_equal_with_and_without(
    server: Server, program: rl.Function, arguments: dict[str, Any], streams: bool
) -> None:
    def run(backend: Counted) -> rl.State:
        if not streams:
            return program.run(**arguments, backend=backend)
        stream = program.stream(**arguments, backend=backend)
        assert "".join(stream)
        return stream.state

    economical, wasteful = Counted(server.url), Counted(server.url, forget=True)
    ours, theirs = run(economical), run(wasteful)
    assert ours.text() == theirs.text()
    assert [c.usage.prompt_tokens for c in ours.calls()] == [
        c.usage.prompt_tokens for c in theirs.calls()
    ]
    assert sum(economical.sizes) < 0.7 * sum(wasteful.sizes)
    sent_whole = [body for body in economical.bodies if BOOK in str(body)]
    assert len(sent_whole) == 1


@pytest.mark.parametrize("program", [chat, story])
def test_a_chat_of_fifty_turns_sends_each_of_them_once(
    server: Server, program: rl.Function
) -> None:
    backend = Counted(server.url)
    state = program.run(turns=50, sampling=rl.Sampling(max_tokens=2), backend=backend)
    said = len(state.text())
    overhead = 50 * (600 + (BLOCK_CHARS if program is story else 0))
    assert sum(backend.sizes) < said + overhead
    assert max(backend.sizes[1:]) < 600 + 2 * BLOCK_CHARS


def test_what_has_gone_is_sent_again_and_nobody_notices(server: Server) -> None:
    backend = Counted(server.url, change_keys=True)
    state = chat.run(turns=3, backend=backend)
    assert state.text() == chat.run(turns=3, backend=Counted(server.url, forget=True)).text()
    continued = ["continue_from" in body for body in backend.bodies]
    assert continued == [False, True, False, True, False]  # tried, refused, sent whole


LIBRARY = BOOK * 4
"""So long that it is sent ahead of the calls."""
assert len(LIBRARY) > SENT_AHEAD_CHARS


def test_forks_that_start_at_once_send_their_prefix_once(server: Server) -> None:
    @rl.function(temperature=0, max_tokens=12)
    def program(s: rl.State, plain: bool) -> list[str]:
        s += LIBRARY if plain else rl.system(LIBRARY)
        forks = s.fork(6)
        for number, fork in enumerate(forks):
            question = f"{number}: what is the port of Vidur?"
            fork += question if plain else rl.user(question)
            fork += rl.gen("x") if plain else rl.assistant(rl.gen("x"))
        return forks.gather("x")

    for plain in (False, True):
        backend = Counted(server.url)
        results = program.run(plain=plain, backend=backend).result
        sent = [path for path, body in backend.posted if LIBRARY[:SENT_AHEAD_CHARS] in str(body)]
        assert sent == ["/v1/conversations"]
        assert all("continue_from" in body for body in backend.bodies)
        assert results == program.run(plain=plain, backend=Counted(server.url, forget=True)).result


def test_runs_of_a_batch_send_what_they_share_once(server: Server) -> None:
    @rl.function(temperature=0, max_tokens=8)
    def program(s: rl.State, number: int) -> None:
        s += rl.system(LIBRARY) + rl.user(f"{number}: what is the fee of Vidur?")
        s += rl.assistant(rl.gen("x"))

    backend = Counted(server.url)
    inputs = [{"number": number} for number in range(8)]
    states = program.run_batch(inputs, backend=backend, progress=False)
    assert all(isinstance(state["x"], str) for state in states)
    sent = [path for path, body in backend.posted if LIBRARY in str(body)]
    assert sent == ["/v1/conversations"]


@pytest.mark.parametrize("text", [BOOK, LIBRARY])
def test_select_sends_its_prompt_once_for_all_choices(server: Server, text: str) -> None:
    @rl.function(temperature=0, max_tokens=8)
    def program(s: rl.State) -> None:
        s += rl.system(text) + rl.user("What is the owner of Vidur?")
        s += rl.assistant(rl.gen("said"))
        with s.fork(2) as forks:
            for number, fork in enumerate(forks):
                fork += rl.user(f"Only the name, {number}.")
                fork += rl.assistant(rl.select("x", ["Noval", "Teska", "Bramol"]))

    backend = Counted(server.url)
    state = program.run(backend=backend)
    sent = [body for _, body in backend.posted if text in str(body)]
    assert len(sent) == 1
    scored = [body for path, body in backend.posted if path == "/score_choices"]
    assert len(scored) == 2
    assert all(len(body["messages"]) == 1 and "continue_from" in body for body in scored)
    assert state["x"] == program.run(backend=Counted(server.url, forget=True))["x"]


def test_a_select_whose_conversation_has_gone_sends_all_again(server: Server) -> None:
    @rl.function(temperature=0, max_tokens=8)
    def program(s: rl.State) -> None:
        s += rl.system(BOOK) + rl.user("What is the owner of Vidur?") + rl.assistant(rl.gen())
        s += rl.user("Only the name.") + rl.assistant(rl.select("x", ["Noval", "Teska"]))

    backend = Counted(server.url, change_keys=True)
    state = program.run(backend=backend)
    scored = [body for path, body in backend.posted if path == "/score_choices"]
    assert ["continue_from" in body for body in scored] == [True, False]
    assert state["x"] == program.run(backend=Counted(server.url, forget=True))["x"]


def test_short_prompts_are_not_kept(server: Server) -> None:
    backend = Counted(server.url)

    @rl.function(temperature=0, max_tokens=4)
    def short(s: rl.State) -> None:
        for _ in range(2):
            s += rl.user("Hi") + rl.assistant(rl.gen())

    short.run(backend=backend)
    assert not any("keep" in body or "continue_from" in body for body in backend.bodies)


# ---------------------------------------------------------------- what is known of what is kept


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "make",
    [lambda text: [message(c) for c in text], lambda text: "".join(c * BLOCK_CHARS for c in text)],
)
def test_the_longest_known_beginning_is_found(make: Callable[[str], Any]) -> None:
    kept, unit = KeptPrompts(), len(make("a"))
    kept.kept("1", make("abc"))
    kept.kept("2", make("abxy"))
    found = {text: kept.longest(make(text)) for text in ("abcd", "abxyz", "abz", "zab", "a")}
    assert {text: prefix and (prefix.conversation, prefix.length // unit) for text, prefix in found.items()} == {
        "abcd": ("1", 3), "abxyz": ("2", 4), "abz": ("2", 2), "zab": None, "a": ("2", 1),
    }  # fmt: skip
    kept.gone("2")
    assert kept.longest(make("abxyz")) is None
    assert (found_again := kept.longest(make("abcd"))) and found_again.conversation == "1"


def test_a_message_is_not_taken_for_two() -> None:
    kept = KeptPrompts()
    kept.kept("1", [message("a"), message("b")])
    assert kept.longest([message('a"},{"role":"user","content":"b')]) is None
    assert kept.longest([{"role": "assistant", "content": "a"}]) is None
