"""The mass that a mask keeps is a sum over the whole softmax of the model's own logits."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.steps import SlotLogprobs
from radixrt.worker.sampling import sampler
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.sampler import draw_by_native_kernel, draw_by_torch, sample
from radixrt.worker.sampling.state import SamplingState

VOCAB = 5003
"""Not a multiple of the 32 tokens of a word."""
DRAWS = [draw_by_torch, *([draw_by_native_kernel] if radixrt_kernels.available() else [])]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "seed": 1},
    {"temperature": 2.0, "repetition_penalty": 1.4, "logit_bias": {7: 30.0}, "seed": 2},
    {"temperature": 1.0, "min_tokens": 5, "logprobs": 2, "seed": 3},
]


def bits_of(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[n, vocab] -> [n, words], by the definition of a word."""
    words = np.zeros((len(allowed), -(-VOCAB // 32)), dtype=np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


def exact(logits: torch.Tensor, allowed: NDArray[np.bool_]) -> float:
    """In float64, over the whole softmax."""
    return float(logits.double().softmax(-1)[torch.from_numpy(allowed)].sum())


def rows_of(sampled: sampler.SampledTokens) -> list[SlotLogprobs]:
    return sampled.read(sampled.tensors())[1]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_it_equals_a_sum_in_float64_whatever_the_settings(draw: sampler.Draw, scale: float) -> None:
    random = np.random.default_rng(int(10 * scale))
    state = SamplingState(16, VOCAB, eos_token_ids=[2])
    count = 12
    for slot in range(count):
        params = SamplingParams(kept_mass=True, **SETTINGS[slot % len(SETTINGS)])
        state.admit(slot, params, np.array([5, 9], dtype=np.int32), 1)
    logits = torch.from_numpy(random.normal(50, scale, (count, VOCAB))).float()
    allowed = random.random((count, VOCAB)) < np.geomspace(1e-3, 1, count)[:, None]
    allowed[:, 5] = True
    allowed[-1] = True
    masked = np.array([row for row in range(count) if row != 4])
    mask = TokenMask(masked, bits_of(allowed[masked]))
    expected = [exact(logits[row], allowed[row]) for row in range(count)]
    expected[4] = 1.0
    rows = rows_of(sample(state, logits, range(count), torch.full((count,), 2), mask, draw))
    assert [row.slot for row in rows] == [*range(count)]
    found = [math.exp(row.log_kept_mass or 0.0) for row in rows]
    assert found == pytest.approx(expected, abs=1e-5)
    assert rows[4].log_kept_mass == 0.0 and all(row.log_kept_mass <= 0 for row in rows)
    assert [len(row.logprobs) for row in rows] == [0, 0, 0, 3] * 3
    assert min(expected) < 0.05


def test_a_small_mass_keeps_its_precision() -> None:
    state = SamplingState(1, VOCAB)
    state.admit(0, SamplingParams(temperature=0, kept_mass=True), np.array([1], dtype=np.int32), 0)
    logits = torch.full((1, VOCAB), 10.0)
    logits[0, 7] = -300.0
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, 7] = True
    mask = TokenMask(np.array([0]), bits_of(allowed))
    (row,) = rows_of(sample(state, logits, [0], torch.ones(1).long(), mask))
    assert row.log_kept_mass == pytest.approx(-310 - math.log(VOCAB - 1), rel=1e-6)


def test_rows_that_do_not_ask_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("nobody has asked")

    state = SamplingState(3, VOCAB)
    prompt = np.array([1], dtype=np.int32)
    for slot, wanted in enumerate((None, 2)):
        state.admit(slot, SamplingParams(temperature=0, logprobs=wanted), prompt, 0)
    mask = TokenMask(np.array([0, 1]), bits_of(np.ones((2, VOCAB), dtype=bool)))
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "log_kept_masses", refuse)
        rows = rows_of(sample(state, torch.zeros(2, VOCAB), [0, 1], torch.ones(2).long(), mask))
    assert [(row.slot, row.log_kept_mass) for row in rows] == [(1, None)]
    state.admit(2, SamplingParams(temperature=0, kept_mass=True), prompt, 0)
    mask = TokenMask(np.array([0, 1, 2]), bits_of(np.ones((3, VOCAB), dtype=bool)))
    rows = rows_of(sample(state, torch.zeros(3, VOCAB), [0, 1, 2], torch.ones(3).long(), mask))
    assert [(row.slot, row.log_kept_mass) for row in rows] == [(1, None), (2, 0.0)]


def test_the_bits_of_log_probabilities_do_not_depend_on_it() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 20
    found = []
    for kept_mass in (False, True):
        state = SamplingState(1, VOCAB)
        params = SamplingParams(temperature=0, logprobs=3, kept_mass=kept_mass)
        state.admit(0, params, np.array([1], dtype=np.int32), 0)
        mask = TokenMask(np.array([0]), bits_of(np.ones((1, VOCAB), dtype=bool)))
        found += rows_of(sample(state, logits.clone(), [0], torch.ones(1).long(), mask))
    assert found[0].logprobs == found[1].logprobs
