"""The noise of sampling passes tests of randomness and depends only on its three arguments."""

import math

import numpy as np
import pytest
import torch

from radixrt.worker.sampling import noise as sampling_noise
from radixrt.worker.sampling.noise import seed_keys


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    return sampling_noise.gumbel_noise(seed_keys(seeds), positions, tokens)


TOKENS = torch.arange(4096, dtype=torch.int32)


def uniform(noise: torch.Tensor) -> np.ndarray:
    """What the noise was made from: uniform on (0, 1) if the noise is standard Gumbel."""
    return torch.exp(-torch.exp(-noise.double())).numpy().ravel()


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations by which counts that should be equal are too unequal."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


GRIDS = {
    "tokens": (torch.full((64,), 7), torch.arange(64)),
    "neighbouring seeds": (torch.arange(64), torch.full((64,), 3)),
    "far positions": (torch.zeros(64, dtype=torch.int64), torch.arange(64) * 1_000_003),
    "seeds of 64 bits": (torch.arange(64) << 57, torch.zeros(64, dtype=torch.int64)),
    "negative seeds": (-torch.arange(64), torch.full((64,), 1)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_noise_is_uniform_in_every_bin_once_transformed_back(name):
    values = uniform(gumbel_noise(*GRIDS[name], TOKENS))
    counts, _ = np.histogram(values, bins=256, range=(0, 1))
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_are_independent_along_tokens_and_along_rows(name, axis):
    values = uniform(gumbel_noise(*GRIDS[name], TOKENS)).reshape(64, -1)
    first, second = (values[:-1], values[1:]) if axis == 0 else (values[:, :-1], values[:, 1:])
    pairs, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[(0, 1)] * 2)
    assert abs(chi_square(pairs)) < 5


def test_seed_and_position_do_not_stand_in_for_each_other():
    one = gumbel_noise(torch.tensor([5]), torch.tensor([6]), TOKENS)
    other = gumbel_noise(torch.tensor([6]), torch.tensor([5]), TOKENS)
    assert (one == other).float().mean() < 0.01


def test_noise_depends_on_its_own_row_and_token_alone():
    seeds, positions = torch.arange(16), torch.arange(16) * 11
    together = gumbel_noise(seeds, positions, TOKENS)
    some = torch.tensor([[4000, 3, 77]])
    for row in range(16):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], some)
        assert torch.equal(alone, together[row : row + 1, some[0]])


def test_noise_is_always_finite_and_its_largest_values_are_fine_grained():
    noise = gumbel_noise(torch.arange(512), torch.arange(512), TOKENS)
    assert noise.isfinite().all()
    largest = noise.flatten().topk(1000).values
    assert largest.unique().numel() > 990
    assert largest[0] > 12


def test_mixing_agrees_with_arithmetic_on_unbounded_integers():
    """The reference works on Python's integers, so nothing wraps unless it says so."""
    seed, position, token = -12345678901234567, 4321, 99_999
    actual = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert actual.item() == pytest.approx(reference_noise(seed, position, token), rel=1e-5)


def reference_noise(seed: int, position: int, token: int) -> float:
    m32, m64 = 2**32 - 1, 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & m64) + position * golden) & m64)
    bits = (token * 0x9E3779B9 + (key & m32)) & m32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & m32
    bits = (((bits ^ (bits >> 15)) + (key >> 32)) * 0x846CA68B) & m32
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))
