"""Models with recurrent layers: a prefix in the tree gives the bits of a cold engine, whatever its
length, and a wrong state would be seen.

``make test`` tries 25 lengths of a prefix, ``make determinism`` every one from 1 to 200, and more
drafts.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.steps import KeepState
from radixrt.scheduler.radix import state_orders
from radixrt.scheduler.radix.states import KeptStates
from radixrt.worker.drafts.price import DraftPrice
from tests.checkpoints import make_checkpoint
from tests.engine.in_process import InProcessEngine

PAGE = 16
EVERY_STATE = "RADIXRT_STATES" in os.environ
LENGTHS = range(1, 201) if EVERY_STATE else sorted({*range(1, 201, 11), 15, 16, 17, 32, 33, 64})
"""Of prefixes: every place in a page, and around its end."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
FAMILIES = ["lfm2", "qwen3_5"]

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="PyTorch's kernels promise nothing of this kind"
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[InProcessEngine, InProcessEngine]]:
    """One that is asked everything, and one that keeps nothing."""
    yield InProcessEngine(folder), InProcessEngine(folder, disable_radix_cache=True)


def poison(engine: InProcessEngine) -> None:
    """Fill all pages and states that hold nothing of use with NaN."""
    kv, runner = engine.scheduler.state.kv, engine.runner
    free_pages = torch.from_numpy(kv.allocator.free_pages()).long()
    for tensor in (tensor for layer in runner.kv_caches for tensor in layer):
        tensor[free_pages] = torch.nan
    states = runner._states
    kept = {states._num_slots + row for row in kv.states.pages()}
    for table in (table for layer in states.tables.layers for table in layer):
        unused = [row for row in range(len(table)) if row not in kept]
        table[unused] = torch.nan


def ask(
    engine: InProcessEngine, prompt: list[int], sampling: SamplingParams = SAMPLING
) -> tuple[list[int], bytes, list[float]]:
    """The answer: its tokens, the bits of all its log-probabilities, and those of the tokens."""
    poison(engine)
    (tokens,) = engine.generate([prompt], sampling)
    rows = engine.logprobs[0]
    bits = b"".join(row.token_ids + np.array(row.logprobs).tobytes() for row in rows)
    return tokens, bits, [row.logprobs[0] for row in rows]


def prompts(length: int, seed: int = 0) -> list[list[int]]:
    """Three prompts with a prefix of this length in common, which no other prompts have."""
    rng = random.Random(1000 * seed + length)
    prefix = [rng.randrange(3, 380) for _ in range(length)]
    return [[*prefix, *(rng.randrange(3, 380) for _ in range(PAGE + 3))] for _ in range(3)]


def test_every_prefix_gives_the_bits_of_a_cold_engine(
    engines: tuple[InProcessEngine, InProcessEngine],
) -> None:
    warm, cold = engines
    for length in LENGTHS:
        for index, prompt in enumerate(prompts(length)):
            assert ask(warm, prompt) == ask(cold, prompt), f"prefix of {length}, prompt {index}"
            if index == 2:
                assert warm.cached == [length // PAGE * PAGE]
            assert cold.cached == [0]


def test_turns_of_a_conversation_start_where_the_last_answer_ended(
    engines: tuple[InProcessEngine, InProcessEngine],
) -> None:
    warm, cold = engines
    history, computed, total = prompts(50, seed=1)[0], 0, 0
    before = history
    for turn in range(6):
        answer = ask(warm, history)
        assert answer == ask(cold, history)
        if turn:
            computed += len(history) - warm.cached[0]
            total += len(history)
            assert warm.cached[0] >= len(before) // PAGE * PAGE - PAGE
        before = history
        history = [*history, *answer[0], 40 + turn, 41, 42, 43, 44]
    assert computed < total / 2


def test_a_state_of_zeros_at_a_hit_changes_the_answer(
    engines: tuple[InProcessEngine, InProcessEngine],
) -> None:
    """Otherwise the other tests would say little: the layers remember what is far behind."""
    warm, _ = engines
    prompt = prompts(50, seed=2)[0]
    ask(warm, prompt)
    right = ask(warm, prompt)
    for table in (table for layer in warm.runner._states.tables.layers for table in layer):
        table[:] = 0
    (wrong,) = warm.generate([prompt], SAMPLING)
    assert warm.cached[0] > 0
    logprobs = [row.logprobs[0] for row in warm.logprobs[0]]
    assert wrong != right[0] or max(map(abs, np.subtract(logprobs, right[2]))) > 0.1


def test_a_state_that_is_one_page_off_is_seen(
    engines: tuple[InProcessEngine, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, cold = engines
    nearest: Callable[..., tuple[int, int]] = KeptStates.nearest

    def shifted(states: KeptStates, pages: np.ndarray) -> tuple[int, int]:
        count, row = nearest(states, pages)
        return (count - 1, row) if count > 1 else (count, row)

    monkeypatch.setattr(KeptStates, "nearest", shifted)
    prompt = prompts(50, seed=3)[0]
    expected = ask(cold, prompt)
    ask(warm, prompt)
    assert ask(warm, prompt) != expected


def test_a_state_that_is_one_token_off_is_seen(
    engines: tuple[InProcessEngine, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, cold = engines
    monkeypatch.setattr(
        state_orders,
        "KeepState",
        lambda slot, position, state: KeepState(slot, position - 1, state),
    )
    prompt = prompts(50, seed=8)[0]
    expected = ask(cold, prompt)
    ask(warm, prompt)
    assert ask(warm, prompt) != expected


def test_rejected_drafts_leave_no_trace(
    folder: Path,
    engines: tuple[InProcessEngine, InProcessEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in the answer, nor in what the next turn finds."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.05)
    drafting, cold = InProcessEngine(folder, speculation="auto"), engines[1]
    rng = random.Random(5)
    for seed in range(4 if EVERY_STATE else 2):
        phrase = [rng.randrange(3, 380) for _ in range(9)]
        sampling = SamplingParams(
            temperature=seed % 2, seed=seed, max_tokens=40, ignore_eos=True, logprobs=3
        )
        prompt = [*phrase, *phrase, *phrase[: seed + 1]]
        for _ in range(3):
            answer = ask(drafting, prompt, sampling)
            assert answer == ask(cold, prompt, sampling)
            prompt = [*prompt, *answer[0], *phrase]
            assert ask(drafting, prompt[:-3], sampling) == ask(cold, prompt[:-3], sampling)
            assert drafting.cached[0] >= len(prompt) - 9 - 2 * PAGE
    counters = drafting.scheduler.state.counters
    accepted = sum(counters.accepted_draft_tokens.values())
    assert 0 < accepted < sum(counters.drafted_tokens.values())


def test_pages_of_one_token(folder: Path, engines: tuple[InProcessEngine, InProcessEngine]) -> None:
    small, cold = InProcessEngine(folder, page_size=1), engines[1]
    for length in (1, 2, 17, 31, 33, 80):
        for index, prompt in enumerate(prompts(length, seed=6)):
            assert ask(small, prompt) == ask(cold, prompt), f"prefix of {length}, prompt {index}"
        assert small.cached == [length]


def test_keys_and_values_in_int8(folder: Path) -> None:
    warm = InProcessEngine(folder, kv_cache_dtype="int8")
    cold = InProcessEngine(folder, kv_cache_dtype="int8", disable_radix_cache=True)
    for prompt in prompts(70, seed=9):
        assert warm.generate([prompt], SAMPLING) == cold.generate([prompt], SAMPLING)
        assert warm.logprobs == cold.logprobs
    assert warm.cached == [64]


def test_sequences_that_compute_one_document_together(
    folder: Path, engines: tuple[InProcessEngine, InProcessEngine]
) -> None:
    """Each goes on from the states of the chunks of the others."""
    warm, cold = InProcessEngine(folder, chunked_prefill_size=32, max_prefill_tokens=64), engines[1]
    rng = random.Random(7)
    document = [rng.randrange(3, 380) for _ in range(330)]
    some = [[*document, *(rng.randrange(3, 380) for _ in range(9))] for _ in range(4)]
    poison(warm)
    together = warm.generate(some, SAMPLING)
    rows = warm.logprobs
    for index, prompt in enumerate(some):
        tokens, bits, _ = ask(cold, prompt)
        assert together[index] == tokens
        assert bits == b"".join(r.token_ids + np.array(r.logprobs).tobytes() for r in rows[index])
    assert sum(warm.cached) > 2.7 * len(document)


def test_ten_conversations_in_the_memory_of_three(
    folder: Path,
    engines: tuple[InProcessEngine, InProcessEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States and pages are dropped all the time; no answer changes, and none is left over."""
    monkeypatch.setattr("radixrt.worker.build.kept_states", lambda setup, pages, one_state: 3)
    tight, cold = InProcessEngine(folder, max_total_tokens=3 * 144, context_length=256), engines[1]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    histories = [prompts(30, seed=20 + number)[0] for number in range(10)]
    for turn in range(3):
        poison(tight)
        given = tight.generate(histories, sampling)
        found = [row for rows in tight.logprobs for row in rows]
        assert given == cold.generate(histories, sampling)
        expected = [row for rows in cold.logprobs for row in rows]
        assert [row.logprobs for row in found] == [row.logprobs for row in expected]
        histories = [
            [*history, *answer, 40 + turn, 41]
            for history, answer in zip(histories, given, strict=True)
        ]
    states = tight.scheduler.state.kv.states
    assert states.num_rows == 3 and len(states) <= 3
    tight.scheduler.flush_cache()
    assert states.num_free == 3
