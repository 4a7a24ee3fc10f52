"""The sampling kernels give the tokens that the reference sampler gives, draw for draw."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import triton
import triton.language as tl

from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import CPU, Device, make_device
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import NO_TOKEN, SlotLogprobs
from radixrt.worker.sampling import noise
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.sampler import SampledTokens, draw_by_torch, draw_in_one_kernel, sample
from radixrt.worker.sampling.state import SamplingState
from radixrt_kernels.triton import sampling
from radixrt_kernels.triton.noise import gumbel_noise
from tests.triton.numbers import DEVICE

PROMPT = np.array([3, 5, 5, 7], dtype=np.int32)
ANSWER = np.array([7, 9, 9], dtype=np.int32)
UNDER_TEST = make_device(torch.device(DEVICE))


@triton.jit
def _noise_kernel(keys, positions, noise, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    drawn = gumbel_noise(tl.load(keys + row), tl.load(positions + row), token)
    tl.store(noise + row * n + token, drawn, mask=token < n)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_noise_is_the_reference_noise() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63)])
    positions = torch.tensor([0, 1, 100_000, 2**40, 7])
    n = 3000
    ours = torch.empty(5, n, device=DEVICE)
    keys = noise.seed_keys(seeds)
    _noise_kernel[(5,)](keys.to(DEVICE), positions.to(DEVICE), ours, n, BLOCK=4096)
    theirs = noise.gumbel_noise(keys, positions, torch.arange(n))
    torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-6, atol=5e-7)


def admit_all(params: list[SamplingParams], vocab: int, device: Device) -> SamplingState:
    state = SamplingState(len(params), vocab, eos_token_ids=[2], device=device)
    known = np.concatenate((PROMPT, ANSWER))
    for slot, sampling_params in enumerate(params):
        state.admit(slot, sampling_params, known, len(ANSWER))
    return state


def both(
    params: list[SamplingParams],
    logits: torch.Tensor,
    mask: TokenMask | None = None,
    steps: int = 1,
) -> tuple[list[SampledTokens], list[SampledTokens]]:
    """The kernel's tokens on the device under test, and the reference's on the CPU."""
    results: list[list[SampledTokens]] = []
    for draw, device in ((draw_in_one_kernel, UNDER_TEST), (draw_by_torch, CPU)):
        state = admit_all(params, logits.shape[1], device)
        slots = np.arange(len(params))
        results.append([])
        for step in range(steps):
            position = len(PROMPT) + len(ANSWER) + step
            positions = torch.full((len(params),), position, device=device.torch_device)
            copied = logits.to(device.torch_device, copy=True)
            results[-1].append(sample(state, copied, slots, positions, mask, draw))
    return results[0], results[1]


def read(sampled: SampledTokens) -> tuple[TokenIds, list[SlotLogprobs]]:
    return sampled.read([tensor.cpu() for tensor in sampled.tensors()])


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def random_mask(rows: int, vocab: int, share: float) -> TokenMask:
    """Every other row is constrained to a share of the tokens."""
    random = np.random.default_rng(1)
    constrained = np.arange(0, rows, 2)
    allowed = random.random((len(constrained), -(-vocab // 32) * 32)) < share
    allowed[:, 5] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return TokenMask(constrained, bits)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "nothing": dict(),
    "cold": dict(temperature=0.3),
    "top_k": dict(top_k=7),
    "top_k of one": dict(top_k=1),
    "a large top_k": dict(top_k=400),
    "top_p": dict(top_p=0.8),
    "a small top_p": dict(top_p=0.01),
    "a top_p near one": dict(top_p=0.999999),
    "min_p": dict(min_p=0.1),
    "all": dict(top_k=30, top_p=0.9, min_p=0.02, temperature=1.7),
    "penalties": dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    "penalties within top_k": dict(top_k=20, repetition_penalty=0.5),
    "bias": dict(logit_bias={4: 8.0, 9: -100.0}, top_p=0.9),
    "min_tokens": dict(min_tokens=20, top_k=3),
}


@pytest.mark.parametrize(("vocab", "share"), [(40, None), (9001, None), (1000, 0.5), (5000, 0.005)])
def test_the_same_tokens_as_the_reference(vocab: int, share: float | None) -> None:
    params = [
        SamplingParams(**{"temperature": 1.0, **settings}, seed=index)
        for index, settings in enumerate(SETTINGS.values())
    ]
    logits = random_logits(len(params), vocab)
    mask = None if share is None else random_mask(len(params), vocab, share)
    ours, theirs = both(params, logits, mask, steps=2)
    for kernel, reference in zip(ours, theirs, strict=True):
        assert read(kernel)[0].tolist() == read(reference)[0].tolist()


@pytest.mark.parametrize(("block", "candidates"), [(64, 8192), (512, 16)])
def test_small_blocks_and_full_candidate_lists_change_nothing(
    monkeypatch: pytest.MonkeyPatch, block: int, candidates: int
) -> None:
    monkeypatch.setattr(sampling, "block_of", lambda size, at_most: block)
    params = [
        SamplingParams(**{"temperature": 2.0, **settings}, seed=index)
        for index, settings in enumerate(SETTINGS.values())
    ]
    logits = random_logits(len(params), 700, seed=3)
    state = admit_all(params, 700, UNDER_TEST)
    packed = state.batch(np.arange(len(params))).packed
    positions = torch.full((len(params),), 9, device=DEVICE)
    given = logits.to(DEVICE, copy=True)
    tokens, _ = sampling.draw_tokens(given, packed, positions, candidates=candidates)
    reference = admit_all(params, 700, CPU)
    for index, settings in enumerate(params):  # draw_tokens alone knows no penalties and no biases
        plain = SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
        )
        reference.release(index)
        reference.admit(index, plain, PROMPT, 0)
    theirs = sample(reference, logits.clone(), np.arange(len(params)), positions.cpu())
    assert tokens.tolist() == theirs.token_ids.tolist()


def test_equal_logits_are_kept_or_dropped_together() -> None:
    """What ties with the k-th largest may come too, in the kernel as in the reference."""
    logits = torch.zeros(50, 64)
    logits[:, ::2] = -0.0
    logits[:, 10:] = -5.0
    params = [SamplingParams(temperature=1.0, top_k=3, seed=seed) for seed in range(50)]
    ours, theirs = both(params, logits)
    tokens = read(ours[0])[0]
    assert tokens.tolist() == read(theirs[0])[0].tolist()
    assert set(tokens.tolist()) == set(range(10))


def test_a_row_gets_the_same_token_in_any_slot() -> None:
    logits = random_logits(6, 5000, seed=5)
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=seed) for seed in range(6)]
    together, _ = both(params, logits)
    for row in reversed(range(6)):
        alone, _ = both([params[row]], logits[row : row + 1])
        assert read(alone[0])[0][0] == read(together[0])[0][row]


def test_broken_logits_are_told_apart() -> None:
    logits = random_logits(5, 300)
    logits[1, 17] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = -float("inf")
    params = [SamplingParams(temperature=float(row % 2), top_p=0.5, seed=1) for row in range(5)]
    ours, _ = both(params, logits)
    tokens = read(ours[0])[0]
    assert (tokens[1:4] == NO_TOKEN).all() and (tokens[[0, 4]] >= 0).all()
    raw = ours[0].token_ids
    assert ((raw >= 0) & (raw < 300)).all(), "the next step embeds them before anyone looks"


def test_log_probabilities_are_those_of_the_logits_as_given() -> None:
    params = [SamplingParams(temperature=1.0, seed=1, logprobs=2, presence_penalty=1.0)] * 2
    ours, theirs = both(params, random_logits(2, 100))
    for kernel, reference in zip(read(ours[0])[1], read(theirs[0])[1], strict=True):
        assert kernel.token_ids == reference.token_ids
        assert kernel.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
