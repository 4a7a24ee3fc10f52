"""Rotation by position is the multiplication of complex numbers, for whole heads and parts of
them."""

import pytest
import torch

from radixrt_kernels.reference.rotary import rotated
from radixrt_kernels.rotary import rotate_

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROUNDING = 8 * torch.finfo(torch.float32).eps  # two products of at most about 4, each rounded once


def table(context_length: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.randn(context_length, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (24, 24), (96, 32), (80, 20), (6, 2)]
)
def test_heads_are_turned_in_place(
    isa: str, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    for tokens in (0, 1, 5, 400):
        cos_sin, positions = table(33, rotary_dim), torch.randint(0, 33, (tokens,))
        projection = torch.randn(tokens, 7 * head_dim).to(dtype)
        query, key, value = (
            part.unflatten(1, (-1, head_dim)) for part in projection.split([4 * head_dim, 2 * head_dim, head_dim], 1)
        )  # fmt: skip
        expected = [rotated(states, positions, cos_sin) for states in (query, key)]
        untouched = value.clone()
        rotate_(positions, query, key, cos_sin)
        # A turned value is a difference of two products: where they cancel, its error is relative
        # to the products.
        for states, right in zip((query, key), expected, strict=True):
            torch.testing.assert_close(
                states, right, rtol=TOLERANCES[dtype], atol=max(ROUNDING, 1e-2 * TOLERANCES[dtype])
            )
        assert torch.equal(value, untouched)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0, 8])}, "positions must be in"),
        ({"positions": torch.tensor([0, -1])}, "positions must be in"),
        ({"positions": torch.tensor([0, 1]).int()}, "positions must be int64"),
        ({"positions": torch.tensor([0])}, "query and key must be"),
        ({"query": torch.zeros(2, 4, 6)}, "no smaller than"),
        ({"key": torch.zeros(2, 1, 8).half()}, "of one dtype"),
        ({"key": torch.zeros(2, 8, 8).transpose(1, 2)}, "without gaps"),
        ({"cos_sin": torch.zeros(8, 7)}, "even rotary_dim"),
        ({"cos_sin": torch.zeros(8, 8).half()}, "cos_sin must be float32"),
    ],
)
def test_what_does_not_fit_is_refused(
    isa: str, change: dict[str, torch.Tensor], message: str
) -> None:
    arguments = {
        "positions": torch.tensor([0, 7]),
        "query": torch.zeros(2, 4, 8),
        "key": torch.zeros(2, 1, 8),
        "cos_sin": torch.zeros(8, 8),
    }
    rotate_(**arguments)
    with pytest.raises(ValueError, match=message):
        rotate_(**{**arguments, **change})
