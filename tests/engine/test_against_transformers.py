"""Greedy tokens of the engine equal those of transformers, whatever the cache, the chunks and the
batch.

``make test`` takes one page size, chunk and backend for each architecture, in turn, 32 tokens of an
answer, three architectures under eviction and 80 requests in a small pool; ``make determinism`` all,
64 tokens, and 300.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from radixrt.attention.metadata import AttentionMetadata
from radixrt.scheduler.queue.admission import Admission
from tests.checkpoints import CONFIGS, HYBRIDS
from tests.engine.in_process import GREEDY, InProcessEngine
from tests.scheduler.engine_model import expect_nothing

# transformers changes phi3's rope factors in the middle of an answer, and with them the keys it has
# cached; radixrt decides once (see layers/rotary.py), and tests/models holds the long factors to
# transformers. Families that compute each token as others do, but for factors, biases and norms,
# are left to tests/models too.
ELSEWHERE = {
    "phi3_long",
    *HYBRIDS,  # an answer ends at a state, not at a page: tests/models and test_states
    *("olmo2", "granite", "seed_oss", "ernie4_5", "exaone4", "hunyuan", "minimax_m2", "gemma4_moe"),
}
ARCHITECTURES = [name for name in CONFIGS if name not in ELSEWHERE]
PAGE_CHUNK_AND_BACKEND = [
    (1, 7, "auto"),
    (16, 64, "torch_reference"),
    (16, 1, "auto"),
    (3, 512, "torch_reference"),
]
IN_FULL = "RADIXRT_DETERMINISM" in os.environ
HUNDREDS = 300 if IN_FULL else 80
"""Of requests in a small pool."""
ANSWER = GREEDY if IN_FULL else msgspec.structs.replace(GREEDY, max_tokens=32)
ONE_TOKEN = msgspec.structs.replace(GREEDY, max_tokens=1)
WARM = msgspec.structs.replace(GREEDY, max_tokens=64 if IN_FULL else 16)
"""Answers behind a hit."""


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Mixed lengths; the last three share their first forty tokens."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 380) for _ in range(40)]
    prompts = [[rng.randrange(3, 380) for _ in range(n)] for n in (1, 2, 17, 33)]
    return prompts + [stem + [rng.randrange(3, 380) for _ in range(n)] for n in (1, 9, 26)]


Check = Callable[[str, list[list[int]], list[list[int]]], None]


@pytest.fixture(scope="module")
def check_greedy(checkpoint: Callable[[str], Path]) -> Check:
    """Check that each token of each answer is transformers' most likely one behind those before it,
    by one forward pass of transformers a prompt: its ``generate`` would take one for each."""
    from transformers import AutoModelForCausalLM

    models: dict[str, torch.nn.Module] = {}
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def check(architecture: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
        if architecture not in models:
            folder = checkpoint(architecture)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            models[architecture] = model.eval()
        for prompt, answer in zip(prompts, answers, strict=True):
            if (key := (architecture, tuple(prompt))) not in known:
                with torch.inference_mode():
                    ids = torch.tensor([prompt + answer[:-1]])
                    logits = models[architecture](ids).logits[0, len(prompt) - 1 :]
                assert logits.argmax(-1).tolist() == answer and len(answer) == ANSWER.max_tokens
                known[key] = answer
            assert answer == known[key]

    return check


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_with_cold_and_warm_cache(
    architecture: str, checkpoint: Callable[[str], Path], check_greedy: Check
) -> None:
    prompts = make_prompts()
    settings = PAGE_CHUNK_AND_BACKEND
    if not IN_FULL:
        settings = [settings[ARCHITECTURES.index(architecture) % len(settings)]]
    for page_size, chunk, backend in settings:
        engine = InProcessEngine(
            checkpoint(architecture),
            page_size=page_size,
            chunked_prefill_size=chunk,
            attention_backend=backend,
        )
        expected = engine.generate(prompts, ANSWER)
        check_greedy(architecture, prompts, expected)
        warm = engine.generate(prompts, WARM)
        assert warm == [answer[: WARM.max_tokens] for answer in expected], "warm"
        assert engine.cached == [(len(p) - 1) // page_size * page_size for p in prompts], (
            "the cache was not hit"
        )
        follow_up = [p + e + [5, 6] for p, e in zip(prompts, expected, strict=True)]
        engine.generate(follow_up, ONE_TOKEN)
        for prompt, answer, cached in zip(prompts, expected, engine.cached, strict=True):
            # the last token of an answer is never computed, so its page may be missing
            assert cached >= (len(prompt) + len(answer) - 1) // page_size * page_size, (
                "the answer was not cached"
            )


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "gpt_oss"] + IN_FULL * ["gemma2", "gemma4_e"]
)
def test_tokens_are_the_same_after_retraction_and_under_eviction(
    architecture: str, checkpoint: Callable[[str], Path], check_greedy: Check
) -> None:
    prompts = make_prompts()
    engine = InProcessEngine(checkpoint(architecture), page_size=4, max_total_tokens=160)
    for _ in range(2):
        check_greedy(architecture, prompts, engine.generate(prompts, ANSWER))
    assert engine.scheduler.state.counters.retractions > 0
    assert engine.scheduler.state.kv.evicted_pages > 0


@pytest.mark.parametrize("careful", [True, False], ids=["careful", "reckless"])
def test_hundreds_of_requests_in_a_pool_for_hardly_more_than_one(
    careful: bool,
    checkpoint: Callable[[str], Path],
    check_greedy: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(1)
    prompts = [rng.choice(make_prompts())[: rng.choice((5, 30, 66))] for _ in range(HUNDREDS)]
    sampling = [msgspec.structs.replace(GREEDY, max_tokens=rng.randint(1, 30)) for _ in prompts]
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    answers = InProcessEngine(checkpoint("llama")).generate(different, ANSWER)
    check_greedy("llama", different, answers)
    whole = {tuple(p): answer for p, answer in zip(different, answers, strict=True)}
    expected = [whole[tuple(p)][: s.max_tokens] for p, s in zip(prompts, sampling, strict=True)]
    if not careful:
        monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    need = max(len(p) + s.max_tokens for p, s in zip(prompts, sampling, strict=True))
    crowded = InProcessEngine(
        checkpoint("llama"),
        page_size=4,
        max_total_tokens=round(1.2 * need),
        max_queued_requests=HUNDREDS,
    )
    assert crowded.generate(prompts, sampling) == expected
    assert careful or crowded.scheduler.state.counters.retractions > 0


def test_cache_salts_keep_prefixes_apart(checkpoint: Callable[[str], Path]) -> None:
    engine = InProcessEngine(checkpoint("llama"), page_size=4)
    prompt = make_prompts()[-1:]
    first = engine.generate(prompt, salt="a")
    assert engine.generate(prompt, salt="b") == first and engine.cached == [0]
    assert engine.generate(prompt, salt="a") == first and engine.cached[0] > 60


def test_radix_cache_can_be_switched_off(
    checkpoint: Callable[[str], Path], check_greedy: Check
) -> None:
    engine = InProcessEngine(checkpoint("llama"), disable_radix_cache=True)
    prompts = make_prompts()
    for _ in range(2):
        check_greedy("llama", prompts, engine.generate(prompts, ANSWER))
        assert engine.cached == [0] * len(prompts)


def test_first_token_may_end_the_answer(checkpoint: Callable[[str], Path]) -> None:
    engine = InProcessEngine(checkpoint("llama"))
    prompt = make_prompts()[3]
    (token,) = engine.generate([prompt], ONE_TOKEN)[0]
    stops = GREEDY.__class__(temperature=0.0, max_tokens=9, stop_token_ids=(token,))
    assert engine.generate([prompt], stops) == [[token]]


@pytest.mark.parametrize("backend", ["auto", "torch_reference"])
def test_questions_on_shared_documents_read_them_once_and_are_answered_as_alone(
    checkpoint: Callable[[str], Path], check_greedy: Check, backend: str
) -> None:
    rng = random.Random(5)
    documents = [[rng.randrange(3, 380) for _ in range(70)] for _ in range(2)]
    prompts = [documents[i % 2] + [rng.randrange(3, 380) for _ in range(3 + i)] for i in range(6)]
    engine = InProcessEngine(checkpoint("llama"), page_size=16, attention_backend=backend)
    groups = []
    plan = engine.runner._forward._backend.plan

    def watched(metadata: AttentionMetadata) -> None:
        if metadata.shared_prefixes is not None:
            groups.append(metadata.shared_prefixes.num_pages.tolist())
        plan(metadata)

    engine.runner._forward._backend.plan = watched  # type: ignore[method-assign]
    check_greedy("llama", prompts, engine.generate(prompts, ANSWER))
    assert [4, 4] in groups, "four whole pages of each document"
