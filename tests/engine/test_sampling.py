"""Sampling through the whole engine: seeds, log-probabilities, minimum lengths."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import unpack_ids
from radixrt.messages.sequences import PositionLogprobs
from radixrt.scheduler.queue.admission import Admission
from tests.checkpoints import make_checkpoint
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.scheduler.engine_model import expect_nothing


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True)


def test_a_seed_gives_the_same_answer_whatever_the_batch(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    params = [seeded(i) for i in range(len(prompts))]
    quiet = InProcessEngine(checkpoint("llama"), page_size=4)
    alone = [quiet.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert len(set(map(tuple, alone))) == len(alone)
    assert quiet.generate(prompts, params) == alone
    assert quiet.generate(prompts[::-1], params[::-1]) == alone[::-1]
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)  # so that pages run out
    crowded = InProcessEngine(checkpoint("llama"), page_size=4, max_total_tokens=120)
    assert crowded.generate(prompts, params) == alone
    assert crowded.scheduler.state.counters.retractions > 0


def test_min_tokens_keeps_stop_tokens_away(checkpoint: Callable[[str], Path]) -> None:
    engine = InProcessEngine(checkpoint("llama"))
    prompt = make_prompts()[2]
    free = engine.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    )[0]
    stop = free[3]
    held = SamplingParams(
        temperature=0.0, max_tokens=10, min_tokens=6, stop_token_ids=(stop,), ignore_eos=True
    )
    answer = engine.generate([prompt], held)[0]
    assert len(answer) >= 6 and stop not in answer[:6] and answer[:3] == free[:3]


def test_end_tokens_beyond_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}')
    engine = InProcessEngine(folder)
    assert engine.info.eos_token_ids == (2,)
    engine.generate(make_prompts(), SamplingParams(temperature=0.0, max_tokens=5, min_tokens=3))


@pytest.fixture(scope="module")
def reference_logprobs(checkpoint: Callable[[str], Path]) -> Callable[[list[int]], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0].log_softmax(-1).detach()


def assert_rows_match(
    rows: list[PositionLogprobs], tokens: list[int], expected: torch.Tensor, num_top: int
) -> None:
    """``expected`` [len(tokens), vocab]: what transformers gives for each of ``tokens``."""
    assert len(rows) == len(tokens)
    for row, token, scores in zip(rows, tokens, expected, strict=True):
        ids = unpack_ids(row.token_ids).tolist()
        assert ids[0] == token and len(ids) == 1 + num_top
        assert row.logprobs == pytest.approx(scores[ids].tolist(), abs=1e-4)
        assert row.logprobs[1:] == pytest.approx(scores.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("pool", [4096, 120])
def test_logprobs_equal_those_of_transformers(
    chunk: int,
    pool: int,
    checkpoint: Callable[[str], Path],
    reference_logprobs: Callable[[list[int]], torch.Tensor],
) -> None:
    engine = InProcessEngine(
        checkpoint("llama"),
        page_size=4,
        chunked_prefill_size=chunk,
        max_prefill_tokens=64,
        max_total_tokens=pool,
    )
    prompts = make_prompts()
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=20, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    for _ in range(2):  # the second time the prompts are cached, and computed all the same
        answers = engine.generate(prompts, params)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            scores = reference_logprobs(prompt + answer)
            assert_rows_match(engine.prompt_logprobs[i], prompt[1:], scores[: len(prompt) - 1], 2)
            assert_rows_match(engine.logprobs[i], answer, scores[len(prompt) - 1 : -1], 3)
    assert (engine.scheduler.state.counters.retractions > 0) == (pool < 4096)
