"""Choosing experts, sorting by expert and summing up are what full sorts and exact sums give, for
every shape, dtype and instruction set."""

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import mixture
from radixrt_kernels.reference import mixture as reference

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""And what one rounding changes."""

SHAPES = [(0, 4, 2), (1, 1, 1), (1, 8, 8), (3, 17, 3), (5, 16, 1), (64, 128, 8), (300, 60, 4)]
"""Tokens, experts and how many of them a token goes to."""


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_experts_of_the_largest_logits_are_chosen(
    isa: str, dtype: torch.dtype, normalize: bool
) -> None:
    """In half precision some logits are equal, and the first of them is taken."""
    for tokens, count, top_k in SHAPES:
        logits = (3 * torch.randn(tokens, count)).to(dtype)
        weights, experts = mixture.choose_experts(logits, top_k, normalize)
        expected_weights, expected_experts = reference.choose_experts(logits, top_k, normalize)
        assert torch.equal(experts, expected_experts)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_logits_far_apart_and_infinite_ones(isa: str) -> None:
    logits = torch.tensor([[-1e30, 500.0, 499.0, -torch.inf, 1e4 - 9500]])
    weights, experts = mixture.choose_experts(logits, 4, normalize=True)
    assert experts.tolist() == [[1, 4, 2, 0]]
    expected = torch.tensor([[0.0, 0.0, -1.0, -torch.inf]]).softmax(-1)
    torch.testing.assert_close(weights, expected)


def test_nan_chooses_different_experts_and_shows_in_their_weights(isa: str) -> None:
    """A token that went wrong must not take others with it by ids that are none."""
    logits = torch.randn(4, 20)
    logits[1], logits[2, 7] = torch.nan, torch.nan
    weights, experts = mixture.choose_experts(logits, 6, normalize=False)
    assert all(len(set(row)) == 6 and set(row) <= set(range(20)) for row in experts.tolist())
    assert weights[1:3].isnan().all()
    expected, _ = reference.choose_experts(logits[[0, 3]], 6, normalize=False)
    torch.testing.assert_close(weights[[0, 3]], expected)


@pytest.mark.parametrize(("tokens", "count", "top_k"), SHAPES)
def test_every_pair_stands_once_among_those_of_its_expert(
    tokens: int, count: int, top_k: int
) -> None:
    if radixrt_kernels.native is None:
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    experts = torch.empty(tokens, top_k, dtype=torch.int64)
    experts.copy_(torch.rand(tokens, count).argsort(dim=1)[:, :top_k])
    groups = mixture.group_by_expert(experts, count)
    sorted_experts, pairs = experts.flatten().sort(stable=True)
    assert torch.equal(groups.starts[1:].long(), sorted_experts.bincount(minlength=count).cumsum(0))
    assert groups.starts[0] == 0
    assert torch.equal(groups.tokens.long(), pairs // top_k)
    assert torch.equal(pairs[groups.places.flatten().long()], torch.arange(tokens * top_k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_summed_by_their_weights(isa: str, dtype: torch.dtype) -> None:
    for tokens, rows, top_k, size in [
        (0, 1, 2, 8),
        (1, 1, 1, 1),
        (2, 9, 3, 15),
        (5, 7, 2, 33),
        (300, 50, 4, 128),
    ]:
        values = torch.randn(rows, size).to(dtype)
        places = torch.randint(0, rows, (tokens, top_k), dtype=torch.int32)
        weights = torch.rand(tokens, top_k)
        result = mixture.weighted_sum(values, places, weights)
        expected = reference.weighted_sum(values, places, weights)
        torch.testing.assert_close(result, expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


IDS = torch.tensor([[0, 1], [2, 1]])
SUMMED = (torch.zeros(4, 8), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("choose_experts", (torch.zeros(2, 3), True, torch.zeros(2, 4), IDS.repeat(1, 2)), "top_k"),
        ("choose_experts", (torch.zeros(3, 3), True, torch.zeros(3, 2), IDS), "experts must be"),
        ("choose_experts", (torch.zeros(2, 3), True, torch.zeros(2, 1), IDS), "weights must be"),
        ("choose_experts", (torch.zeros(3, 2).T, True, torch.zeros(2, 2), IDS), "logits must be"),
        ("choose_experts", (IDS, True, torch.zeros(2, 2), IDS), "float32, bfloat16 or float16"),
        ("weighted_sum", (*SUMMED, torch.zeros(2, 7)), "output must be"),
        ("weighted_sum", (*SUMMED, torch.zeros(3, 8)), "places must be"),
        ("weighted_sum", (*SUMMED, torch.zeros(2, 8).half()), "output must be"),
        ("weighted_sum", (*SUMMED[:2], torch.zeros(2, 3), torch.zeros(2, 8)), "weights must be"),
        ("weighted_sum", (SUMMED[0], SUMMED[1] + 4, SUMMED[2], torch.zeros(2, 8)), "from 0 to"),
        ("weighted_sum", (SUMMED[0], SUMMED[1] - 1, SUMMED[2], torch.zeros(2, 8)), "from 0 to"),
    ],
)
def test_what_does_not_fit_is_refused(
    isa: str, kernel: str, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(radixrt_kernels.native, kernel)(*arguments)


@pytest.mark.parametrize(
    ("experts", "num_experts", "message"),
    [(IDS, 2, "from 0 to"), (IDS - 1, 3, "from 0 to"), (IDS.int(), 3, "experts must be"), (IDS.T, 3, "experts must be")],
)  # fmt: skip
def test_experts_that_are_not_there_are_refused(
    isa: str, experts: torch.Tensor, num_experts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixture.group_by_expert(experts, num_experts)
