"""Attention over latents is its definition: one tensor, whose first features are the values."""

import itertools

import pytest
import torch

from radixrt_kernels.attention import SCALE_BYTES, AttentionPlan
from radixrt_kernels.reference.attention import decoded, paged_attention

SIZES = [(4, 32, 8), (16, 64, 16), (20, 512, 64), (130, 32, 8), (1, 18, 6)]
"""(query heads, features of a value, features of a key beside these)"""
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}
STEP = [(1, 700), (9, 300), (1, 3), (65, 65)]
"""(new tokens, tokens) of each sequence"""


class Latents:
    """A step over random latents on pages of 5 in an arbitrary order; unused ones are NaN."""

    def __init__(
        self, heads: int, dims: tuple[int, int], dtype: torch.dtype, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.value_dim, self.page_size = dims[0], 5
        tokens = sum(new for new, _ in STEP)
        pages = [-(-length // 5) for _, length in STEP]
        order = torch.randperm(sum(pages) + 3)
        self.query = torch.randn(tokens, heads, sum(dims)).to(dtype)
        whole = torch.randn(len(order) * 5, 1, sum(dims)).to(dtype)
        self.cache = torch.full((len(order), 5, 1, sum(dims)), torch.nan, dtype=dtype)
        self.indptr = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in ([s[0] for s in STEP], pages)]  # fmt: skip
        self.last = torch.tensor([(length - 1) % 5 + 1 for _, length in STEP], dtype=torch.int32)
        self.pages = order[: sum(pages)].int()
        slots, keys = [], []
        for i, (new, length) in enumerate(STEP):
            own = self.pages[int(self.indptr[1][i]) :].repeat_interleave(5).long() * 5
            places = (own + torch.arange(5).repeat(len(own) // 5))[:length]
            self.cache.view(-1, 1, sum(dims))[places[: length - new]] = whole[
                places[: length - new]
            ]
            slots.append(places[length - new :])
            keys.append(whole[slots[-1]])
        self.slots, self.key = torch.cat(slots), torch.cat(keys)

    def attend(self, cache: torch.Tensor, scale: float = 0.04) -> torch.Tensor:
        plan = AttentionPlan(*self.indptr, self.last, self.pages, self.slots, self.page_size)
        return plan.attend(self.query, self.key, None, cache, None, scale, value_dim=self.value_dim)

    def expected(
        self, cache: torch.Tensor, values: torch.Tensor, scale: float = 0.04
    ) -> torch.Tensor:
        return paged_attention(
            self.query, cache, values, *self.indptr, self.last, self.pages, scale
        )


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize(("heads", "value_dim", "rope"), SIZES)
def test_values_are_the_first_features_of_the_keys(
    isa: str, heads: int, value_dim: int, rope: int, dtype: torch.dtype
) -> None:
    step = Latents(heads, (value_dim, rope), dtype)
    found = step.attend(step.cache)
    expected = step.expected(step.cache, step.cache[..., :value_dim])
    torch.testing.assert_close(found.double(), expected, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "value_dim", "rope"), SIZES)
def test_a_coded_latent_has_a_scale_for_its_value_and_one_for_the_rest(
    isa: str, heads: int, value_dim: int, rope: int, dtype: torch.dtype
) -> None:
    """The rest is a hundred times as large: with one scale for both, values would be lost."""
    step = Latents(heads, (value_dim, rope), dtype)
    step.key[..., value_dim:] *= 100.0
    known = step.cache.clone()
    known[..., value_dim:] *= 100.0
    known.view(-1, 1, value_dim + rope)[step.slots] = step.key
    coded = torch.full((*known.shape[:3], value_dim + rope + 2 * SCALE_BYTES), -1, dtype=torch.int8)
    slots = torch.arange(known.shape[0] * 5)
    write_all(step, known, coded, slots)
    found = step.attend(coded, scale=1e-3)
    value = decoded(coded[..., : value_dim + SCALE_BYTES], rotated=False)
    other = decoded(coded[..., value_dim + SCALE_BYTES :], rotated=True)
    keys = torch.cat((value, other), -1)
    expected = step.expected(keys, value, 1e-3)
    torch.testing.assert_close(found.double(), expected, atol=ATOL[dtype], rtol=0)
    exact = step.expected(known, known[..., :value_dim], 1e-3)
    assert (found.double() - exact).abs().max() < 0.06


def write_all(step: Latents, known: torch.Tensor, coded: torch.Tensor, slots: torch.Tensor) -> None:
    """Code every latent of ``known``, by a prefill of one sequence over all pages."""
    count = len(slots)
    plan = AttentionPlan(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([0, count // 5], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.arange(count // 5, dtype=torch.int32),
        slots,
        5,
    )
    keys = known.view(-1, 1, known.shape[-1])
    query = torch.zeros(count, 1, known.shape[-1], dtype=known.dtype)
    plan.attend(query, keys, None, coded, None, 1.0, value_dim=step.value_dim)


def test_a_value_beside_latents_and_a_width_that_does_not_fit_are_refused(isa: str) -> None:
    step = Latents(4, (32, 8), torch.float32)
    plan = AttentionPlan(*step.indptr, step.last, step.pages, step.slots, 5)
    with pytest.raises(ValueError, match="fewer features"):
        plan.attend(step.query, step.key, None, step.cache, None, 0.04)
    with pytest.raises(ValueError, match="there is no value"):
        plan.attend(step.query, step.key, step.key[..., :32], step.cache, None, 0.04, value_dim=32)
    with pytest.raises(ValueError, match="the caches must be"):
        plan.attend(step.query, step.key, None, step.cache[..., :38], None, 0.04, value_dim=32)
