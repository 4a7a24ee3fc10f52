"""The native sampler takes the tokens that the reference sampler takes, draw for draw, and
normalizes as torch does."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.steps import NO_TOKEN
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.sampler import draw_by_native_kernel, draw_by_torch, sample
from radixrt.worker.sampling.state import SamplingState
from radixrt_kernels import sampler

PROMPT = np.array([3, 5, 5, 7], dtype=np.int32)
ANSWER = np.array([7, 9, 9], dtype=np.int32)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 5.0},
    "top_k_1": {"top_k": 1},
    "top_k": {"top_k": 20},
    "large_top_k": {"top_k": 400},
    "top_p": {"top_p": 0.9},
    "small_top_p": {"top_p": 0.01},
    "large_top_p": {"top_p": 0.9999},
    "hot_top_p": {"top_p": 0.95, "temperature": 3.0},
    "both": {"top_k": 50, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 100, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "biases": {"logit_bias": {9: 5.0, 3: -100.0}, "min_tokens": 9, "top_p": 0.7},
}
EACH = 6
"""Rows with each of them."""


def state_of(params: list[SamplingParams], vocab: int) -> SamplingState:
    state = SamplingState(len(params), vocab, eos_token_ids=[2])
    for slot, sampling_params in enumerate(params):
        state.admit(slot, sampling_params, np.concatenate((PROMPT, ANSWER)), len(ANSWER))
    return state


def random_logits(rows: int, vocab: int, shape: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    return {
        "flat": logits * 0.1,
        "usual": logits * 3,
        "peaked": logits * 30,
        "tied": (logits * 2).round(),
    }[shape]


def tokens(
    params: list[SamplingParams], logits: torch.Tensor, mask: TokenMask | None, *, native: bool
) -> np.ndarray:
    """Of two steps, [2, rows]."""
    state = state_of(params, logits.shape[1])
    slots = np.arange(len(params))
    draw = draw_by_native_kernel if native else draw_by_torch
    found = []
    for step in range(2):
        positions = torch.arange(len(params)) + 7 + step
        sampled = sample(state, logits.clone(), slots, positions, mask, draw)
        found.append(sampled.read(sampled.tensors())[0])
    return np.stack(found)


def random_mask(rows: int, vocab: int, share: float) -> TokenMask:
    random = np.random.default_rng(vocab)
    masked = np.arange(0, rows, 2, dtype=np.int64)
    allowed = random.random((len(masked), -(-vocab // 32) * 32)) < share
    allowed[:, random.integers(0, vocab, 3)] = True
    bits = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    return TokenMask(masked, bits)


EVERY_SETTING = [
    SamplingParams(seed=100 * number + i, **{"temperature": 1.0, **changes})
    for number, changes in enumerate(SETTINGS.values())
    for i in range(EACH)
]


@functools.cache
def problem_of(
    vocab: int, shape: str, share: float | None
) -> tuple[torch.Tensor, TokenMask | None, np.ndarray]:
    """Logits and mask for every setting, and the reference's tokens: the same for each instruction
    set."""
    logits = random_logits(len(EVERY_SETTING), vocab, shape, seed=vocab)
    mask = None if share is None else random_mask(len(EVERY_SETTING), vocab, share)
    return logits, mask, tokens(EVERY_SETTING, logits, mask, native=False)


@pytest.mark.parametrize("shape", ["flat", "usual", "peaked", "tied"])
@pytest.mark.parametrize("vocab", [30, 64, 1000, 16_001])
@pytest.mark.parametrize("share", [None, 0.5, 0.003])
def test_every_setting_gives_the_reference_token(
    isa: str, vocab: int, shape: str, share: float | None
) -> None:
    logits, mask, expected = problem_of(vocab, shape, share)
    # The logarithms may differ in the last bit, and so a draw that is nearly tied.
    found = tokens(EVERY_SETTING, logits, mask, native=True)
    assert (found != expected).mean() <= 1 / expected.size


@pytest.mark.parametrize("vocab", [5, 100, 50_000])
def test_greedy_takes_the_first_of_the_largest(isa: str, vocab: int) -> None:
    logits = torch.randint(0, 3, (20, vocab)).float()
    params = [SamplingParams(temperature=0.0)] * 20
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens(params, logits, None, native=True)[0].tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p", "all"])
def test_logits_that_are_not_finite_give_no_token_and_disturb_no_other_row(
    isa: str, bad: float, name: str
) -> None:
    params = [SamplingParams(seed=1, **{"temperature": 1.0, **SETTINGS[name]})] * 3
    logits = random_logits(3, 200, "usual", seed=0)
    usual = tokens(params, logits, None, native=True)[0]
    logits[1, 77] = bad
    found = tokens(params, logits, None, native=True)[0]
    assert found[1] == NO_TOKEN
    assert found[0] == usual[0] and found[2] == usual[2]
    logits[1] = bad
    assert tokens(params, logits, None, native=True)[0][1] == NO_TOKEN


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call that is in order but for ``changes``."""
    rows, vocab = 2, 40
    settings = torch.zeros(rows, 6, dtype=torch.int32)
    settings[:, 1] = vocab
    return {
        "logits": torch.zeros(rows, vocab),
        "settings": settings,
        "positions": torch.zeros(rows, dtype=torch.int64),
        "mask": (torch.tensor([1]), torch.full((1, 2), -1, dtype=torch.int32)),
        "token_ids": torch.zeros(rows, dtype=torch.int64),
        "peaks": torch.zeros(rows),
        **changes,
    }


def mask_of(rows: list[int], words: int, dtype: torch.dtype = torch.int32) -> Any:
    return torch.tensor(rows), torch.zeros(len(rows), words, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 40).half()}, "logits must be"),
        ({"logits": torch.zeros(40)}, "logits must be"),
        ({"logits": torch.zeros(40, 2).T}, "logits must be"),
        ({"settings": torch.zeros(2, 5, dtype=torch.int32)}, "settings must be"),
        ({"settings": torch.zeros(2, 6, dtype=torch.int32)}, "top_k must be at least 1"),
        ({"settings": torch.full((2, 6), -1, dtype=torch.int32)}, "top_k must be at least 1"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions must be"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "token_ids must be"),
        ({"peaks": torch.zeros(2, 1)}, "peaks must be"),
        ({"mask": mask_of([1], 1)}, "allowed must be"),
        ({"mask": mask_of([1], 2, torch.int64)}, "allowed must be"),
        ({"mask": mask_of([2], 2)}, "rows of logits"),
        ({"mask": mask_of([-1], 2)}, "rows of logits"),
    ],
)
def test_what_does_not_fit_is_refused(isa: str, changes: dict[str, Any], message: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    native.sample(**arguments())
    with pytest.raises((ValueError, TypeError), match=message):
        native.sample(**arguments(**changes))


def test_no_rows_are_no_tokens(isa: str) -> None:
    found, peaks = sampler.draw_tokens(
        torch.zeros(0, 40), torch.zeros(0, 6, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    )
    assert found.shape == peaks.shape == (0,)


def test_log_sum_exp_is_what_torch_computes_and_the_same_in_any_batch(isa: str) -> None:
    for vocab in (1, 15, 16, 1000):
        for scale in (0.1, 5.0, 100.0):
            logits = scale * torch.randn(5, vocab)
            result = sampler.log_sum_exp(logits)
            expected = logits.double().logsumexp(-1)
            torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=1e-6)
            assert torch.equal(torch.cat([sampler.log_sum_exp(r) for r in logits.split(1)]), result)
    inf = torch.inf
    odd = torch.tensor([[-inf] * 3, [-inf, 2.0, -inf], [0.0, inf, 1.0], [torch.nan, 0.0, 1.0]])
    expected = torch.tensor([-inf, 2.0, inf, torch.nan])
    torch.testing.assert_close(sampler.log_sum_exp(odd), expected, equal_nan=True)
    assert sampler.log_sum_exp(torch.zeros(0, 4)).shape == (0,)
    with pytest.raises(ValueError, match=r"logits must be \[rows, vocab\]"):
        sampler.log_sum_exp(torch.zeros(4))


def test_log_kept_mass_is_a_part_of_the_softmax_and_the_same_in_any_batch(isa: str) -> None:
    for vocab in (1, 31, 33, 3000):
        words = -(-vocab // 32)
        for scale in (0.1, 5.0, 100.0):
            logits = 50 + scale * torch.randn(5, vocab)
            allowed = torch.rand(5, 32 * words) < torch.tensor([[1.0], [0.5], [0.1], [0.9], [2.0]])
            allowed[:, 0] = True
            powers = 2 ** torch.arange(32)
            bits = (allowed.unflatten(1, (-1, 32)) * powers).sum(-1).int()  # wraps to 32 bits
            rows = torch.tensor([3, 0, 4, 1])
            found = sampler.log_kept_mass(logits, rows, bits[rows])
            kept = logits.double().softmax(-1).where(allowed[:, :vocab], 0).sum(-1)[rows]
            torch.testing.assert_close(found.double(), kept.log(), atol=2e-6, rtol=1e-6)
            one = [
                sampler.log_kept_mass(logits[r : r + 1], torch.tensor([0]), bits[r : r + 1])
                for r in rows
            ]
            assert torch.equal(torch.cat(one), found)
    far = torch.tensor([[0.0, -200.0, -200.0], [0.0, -torch.inf, 1.0]])
    bits = torch.tensor([[0b110], [0b010]], dtype=torch.int32)
    found = sampler.log_kept_mass(far, torch.tensor([0, 1]), bits)
    torch.testing.assert_close(found, torch.tensor([-200 + math.log(2), -torch.inf]))
    none = sampler.log_kept_mass(far[:1], torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
    assert none == -torch.inf
    with pytest.raises(ValueError, match="mask_rows must hold rows of logits"):
        sampler.log_kept_mass(far, torch.tensor([2]), bits[:1])
