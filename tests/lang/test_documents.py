"""Passages that are cached stand first, within the limit; all others stand by rank."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import radixrt.lang as rl
from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import CachedPrompt, Prompt
from radixrt.lang.runtime.cached_order import cached_order
from tests.lang.scripted_backend import ScriptedBackend
from tests.servers import Server

BEFORE = "Read this.|"
NUM_PASSAGES = 5


class Cache(ScriptedBackend):
    """Has cached some texts; a token is a character."""

    def __init__(self, texts: Sequence[str], page: int = 1) -> None:
        super().__init__()
        self.texts, self.page = texts, page

    async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
        self.num_matches += 1
        return [
            CachedPrompt(prompt_tokens=len(one), cached_tokens=self.found(str(one)))
            for one in prompts
        ]

    def found(self, prompt: str) -> int:
        longest = max((common_prefix_length(prompt, text) for text in self.texts), default=0)
        return longest // self.page * self.page


def passages(sizes: Sequence[int]) -> list[str]:
    return [chr(ord("a") + number) * size for number, size in enumerate(sizes)]


def joined(texts: Sequence[str], order: Sequence[int]) -> str:
    return BEFORE + "".join(texts[index] + "|" for index in order)


def ordered(cache: Cache, texts: Sequence[str], max_shift: int | None = None) -> list[int]:
    return asyncio.run(cached_order(cache, BEFORE, texts, "|", max_shift))


orders = st.permutations(range(NUM_PASSAGES)).flatmap(
    lambda order: st.integers(0, NUM_PASSAGES).map(lambda length: order[:length])
)


@given(st.lists(orders, max_size=3), st.none() | st.integers(0, NUM_PASSAGES), st.integers(20, 60))
def test_no_order_within_the_limit_has_more_cached(
    cached: list[list[int]], max_shift: int | None, size: int
) -> None:
    """Against all orders, by brute force. Of those that are equal, the one nearest to the ranks is
    taken."""
    texts = passages([size] * NUM_PASSAGES)
    cache = Cache([joined(texts, order) for order in cached])
    allowed = [
        order
        for order in itertools.permutations(range(NUM_PASSAGES))
        if max_shift is None or all(abs(i - rank) <= max_shift for i, rank in enumerate(order))
    ]
    most = max(cache.found(joined(texts, order)) for order in allowed)
    expected = next(order for order in allowed if cache.found(joined(texts, order)) == most)
    assert tuple(ordered(cache, texts, max_shift)) == expected
    chain = sum(1 for length in range(1, NUM_PASSAGES) if len(BEFORE) + length * (size + 1) <= most)
    assert cache.num_matches <= chain + 1


def test_the_longest_chain_goes_before_the_longest_passage() -> None:
    texts = passages([30, 30, 30, 80])
    assert ordered(Cache([joined(texts, [2, 1, 0]), joined(texts, [3])]), texts) == [2, 1, 0, 3]
    assert ordered(Cache([joined(texts, [2]), joined(texts, [3])]), texts) == [3, 0, 1, 2]


def test_a_passage_of_which_little_is_cached_stays() -> None:
    """Passages begin alike, and pages end where they like: that moves nothing."""
    texts = ["Title: " + text for text in passages([60, 60, 60])]
    assert ordered(Cache([joined(texts, [1])[:45]], page=16), texts) == [0, 1, 2]
    assert ordered(Cache([joined(texts, [1])], page=16), texts) == [1, 0, 2]


def test_a_system_message_is_looked_for_with_a_user_message_behind_it() -> None:
    """Templates of Gemma write the first into the second."""
    asked: list[Prompt] = []

    class Noting(ScriptedBackend):
        async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
            asked.extend(prompts)
            return None

    system = {"role": "system", "content": "Read. "}
    assert rl.order_documents(["a", "b"], [system], separator="|", backend=Noting()) == [0, 1]
    assert [[one["content"] for one in prompt] for prompt in asked] == [  # type: ignore[index]
        ["Read. ", ""], ["Read. a|", ""], ["Read. b|", ""]
    ]  # fmt: skip


def test_many_passages_are_asked_for_in_calls_that_servers_take() -> None:
    texts = [f"{number:03}" * 9 for number in range(300)]
    asked: list[int] = []

    class Counting(Cache):
        async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
            asked.append(len(prompts))
            return await super().match_cache(prompts)

    assert ordered(Counting([joined(texts, [7, 3, 5])]), texts)[:4] == [7, 3, 5, 0]
    assert max(asked) <= 256


@rl.function
def reader(s: rl.State, texts: list[str], **options: Any) -> None:
    s += "Read this.|" + rl.documents(texts, name="order", separator="|", **options)
    s += "|Why?" + rl.gen("answer")


def test_the_order_is_a_variable_and_the_prompt_has_it() -> None:
    backend = ScriptedBackend()
    backend.caches_prefixes = True
    texts = passages([40, 40, 40])
    first = reader.run([texts[2], texts[0]], backend=backend)
    assert first["order"] == [0, 1]
    state = reader.run(texts, order="cached", backend=backend)
    assert state["order"] == [2, 0, 1]
    assert state.text().startswith(joined(texts, [2, 0, 1]) + "Why?")
    assert [call.what for call in state.calls()] == ["documents('order')", "gen('answer')"]
    assert reader.run(texts, order="cached", max_shift=1, backend=backend)["order"] == [0, 1, 2]


def test_the_order_waits_for_what_stands_before_it() -> None:
    backend = ScriptedBackend(lambda prompt: "well")
    backend.caches_prefixes = True
    texts = passages([40, 40])

    @rl.function
    def later(s: rl.State, order: str) -> None:
        s += "a" + rl.gen("x") + rl.documents(texts[::-1] if order == "rank" else texts, order)  # type: ignore[arg-type]
        s += rl.gen("y")

    later.run("rank", backend=backend)
    assert later.run("cached", backend=backend).text() == f"awell{texts[1]}\n\n{texts[0]}well"


def test_rank_order_asks_nothing_and_needs_no_backend_that_tells() -> None:
    backend = ScriptedBackend()
    texts = passages([40, 40])
    assert reader.run(texts, backend=backend)["order"] == [0, 1] and backend.num_matches == 0
    assert reader.run(texts[:1], order="cached", backend=backend)["order"] == [0]
    assert backend.num_matches == 0
    assert reader.run(texts, order="cached", backend=backend)["order"] == [0, 1]
    assert backend.num_matches == 1, "it does not tell"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one"),
        (("text",), "list of texts"),
        (([1],), "list of texts"),
        ((["a"], "best"), "order"),
        ((["a"], "cached", -1), "max_shift"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[Any, ...], message: str) -> None:
    given, *rest = arguments
    named = dict(zip(("order", "max_shift"), rest, strict=False))
    with pytest.raises(rl.ProgramError, match=message):
        rl.documents(given, **named)


FACTS = [
    " ".join(f"The {field} of {name} is {value}{number}." for number, field in enumerate(("port", "owner", "fee", "guard")))
    for name, value in (("Vidur", "Noval"), ("Teska", "Bramol"), ("Ulmar", "Zekoru"))
]  # fmt: skip


@rl.function(temperature=0, max_tokens=4)
def asked(s: rl.State, texts: list[str], question: str, role: str) -> None:
    with s.system() if role == "system" else s.user():
        s += "Answer from this text.\n\n" + rl.documents(texts, "cached", name="order")
        s += "" if role == "system" else f"\n\n{question}"
    if role == "system":
        s += rl.user(question)
    s += rl.assistant(rl.gen("answer"))


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("name", ["backend", "engine"])
def test_a_server_and_an_engine_find_the_cached_passages(
    name: str, role: str, server: Server, request: pytest.FixtureRequest
) -> None:
    backend = request.getfixturevalue(name)
    if name == "engine":
        request.getfixturevalue("demo_llm").flush_cache()
    else:
        httpx.post(f"{server.url}/flush_cache")
    first, second, third = FACTS
    assert asked.run([first, second], "Why?", role, backend=backend)["order"] == [0, 1]
    state = asked.run([third, second, first], "When?", role, backend=backend)
    assert state["order"] == [2, 1, 0]
    usage = state.calls()[-1].usage
    assert usage.cached_tokens > 0.55 * usage.prompt_tokens
    before = [{"role": role, "content": "Answer from this text.\n\n"}]
    assert rl.order_documents([second, first], before, backend=backend) == [1, 0]


def test_another_servers_order_is_by_rank(server: Server) -> None:
    other = rl.OpenAI(server.url, model="demo")
    assert rl.order_documents(FACTS, backend=other) == [0, 1, 2]
