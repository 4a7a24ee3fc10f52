"""The cache in the hands of a Python program: hints, warm, pin and release on ``LLM``."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from radixrt import LLM, CacheHint, SamplingParams
from radixrt.base.errors import RequestError
from tests.checkpoints import make_served
from tests.servers.engine_in_threads import engines_in_threads

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PAGE, DEFAULT_POOLING, LENGTH = 4, 512, 60


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_served(tmp_path_factory.mktemp("llama"))
    with engines_in_threads():
        llm = LLM(str(folder), page_size=PAGE, max_total_tokens=DEFAULT_POOLING)
    with llm:
        yield llm


@pytest.fixture(autouse=True)
def everything_is_accounted_for(llm: LLM) -> Iterator[None]:
    llm.flush_cache()
    yield
    stats = llm.stats(check_invariants=True)
    assert stats.leases == stats.pages_owned == 0


_numbers = itertools.count()


def new_prompt(length: int = LENGTH) -> list[int]:
    rng = random.Random(next(_numbers))
    return [rng.randrange(20, 380) for _ in range(length)]


def flood(llm: LLM) -> None:
    for _ in range(2 * DEFAULT_POOLING // LENGTH):
        llm.generate(new_prompt(), GREEDY)


def test_what_is_warmed_is_found(llm: LLM) -> None:
    prompt = new_prompt()
    warmed = llm.warm(prompt)
    assert (warmed.prompt_tokens, warmed.cached_tokens) == (LENGTH, 0)
    output = llm.generate([*prompt, 30], GREEDY)
    assert output.cached_tokens == warmed.cache_write_tokens == LENGTH
    assert output.cached_tokens + output.cache_write_tokens <= output.num_prompt_tokens
    assert llm.cache_stats().cached_tokens >= LENGTH


def test_a_warmed_conversation_is_the_beginning_of_those_to_come(llm: LLM) -> None:
    system = {"role": "system", "content": "Be kind to each other."}
    warmed = llm.warm([system])
    answer = llm.chat([system, {"role": "user", "content": "Hello"}], GREEDY)
    assert answer.cached_tokens == warmed.prompt_tokens // PAGE * PAGE


def test_hints_decide_who_goes_and_change_no_answer(llm: LLM) -> None:
    prompt, other = new_prompt(), new_prompt()
    first = llm.generate(prompt, GREEDY, cache=CacheHint(retain="high", ttl_s=600))
    llm.generate(other, GREEDY)
    flood(llm)
    again = llm.generate(prompt, GREEDY, cache=CacheHint(next_use_s=1, session="s"))
    assert again.cached_tokens >= LENGTH - PAGE and again.token_ids == first.token_ids
    assert llm.generate(other, GREEDY).cached_tokens == 0


def test_a_pinned_prompt_stays_to_the_end_of_its_block(llm: LLM) -> None:
    prompt = new_prompt()
    with llm.pin(prompt, ttl_s=60) as pinned:
        assert pinned.pinned_tokens == pinned.num_prompt_tokens == LENGTH
        flood(llm)
        assert llm.cache_stats().tokens.pinned == LENGTH
        assert llm.generate([*prompt, 30], GREEDY).cached_tokens == LENGTH
    assert llm.cache_stats().leases == 0
    flood(llm)
    assert llm.generate([*prompt, 30], GREEDY).cached_tokens == 0


def test_a_lease_can_end_before_its_block(llm: LLM) -> None:
    with llm.pin(new_prompt()) as pinned:
        assert llm.release(pinned.lease) == LENGTH
        with pytest.raises(RequestError) as refused:
            pinned.release()
        assert refused.value.status == 404


def test_a_session_is_released_by_name_and_salt(llm: LLM) -> None:
    hint = CacheHint(session="agent")
    llm.generate(new_prompt(), GREEDY, cache=hint, cache_salt="mine")
    for _ in llm.stream(new_prompt(), GREEDY, cache=hint, cache_salt="mine"):
        pass
    sessions = llm.cache_stats().sessions
    assert llm.release(session="agent") == 0
    assert llm.cache_stats().sessions == sessions
    assert llm.release(session="agent", cache_salt="mine") >= 2 * (LENGTH - PAGE)
    assert llm.cache_stats().sessions == sessions - 1


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (CacheHint(retain="forever"), "none, default, high"),
        (CacheHint(until_token=4), "retain"),
        (CacheHint(retain="high", ttl_s="long"), "cache.ttl_s"),  # type: ignore[arg-type]
        (CacheHint(session="s" * 300), "256"),
    ],
)
def test_a_bad_hint_is_refused_before_anything_runs(llm: LLM, hint: CacheHint, words: str) -> None:
    for call in (llm.generate, llm.warm):
        with pytest.raises(RequestError, match=words):
            call(new_prompt(), cache=hint)


@pytest.mark.parametrize("arguments", [{}, {"lease": "a", "session": "b"}])
def test_release_wants_one_thing(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="one of them"):
        llm.release(**arguments)


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf")])
def test_a_lease_needs_a_time(llm: LLM, ttl_s: float) -> None:
    with pytest.raises(RequestError, match="ttl_s"):
        llm.pin(new_prompt(), ttl_s=ttl_s)
