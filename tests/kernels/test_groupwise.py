"""Linear layers of codes are what decoding and multiplying give, for every shape, group, dtype and
instruction set."""

from typing import Any

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import groupwise
from radixrt_kernels.reference import groupwise as reference

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""And what one rounding changes."""

SHAPES = [
    (1, 1, 9),
    (16, 8, 8),
    (17, 20, 20),
    (33, 200, 200),
    (64, 64, 32),
    (70, 256, 128),
    (130, 136, 8),
    (20, 100, 96),
]
"""Rows, columns and group size: whole rows, groups of one and of several chunks, a short last
group."""


def random_matrix(rows: int, columns: int, bits: int, group_size: int) -> groupwise.PackedCodes:
    groups = -(-columns // group_size)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8)
    scales = torch.rand(rows, groups).add(0.1).half()
    return groupwise.pack(codes, scales, zeros, bits, group_size)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[result.dtype]
    scale = float(expected.double().abs().max())
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_is_what_decoding_and_multiplying_give(
    isa: str, dtype: torch.dtype, bits: int
) -> None:
    for rows, columns, group_size in SHAPES:
        matrix = random_matrix(rows, columns, bits, group_size)
        bias = torch.randn(rows).to(dtype)
        for tokens in (0, 1, 2, 5, 7, 20, 33, 48):
            hidden = torch.randn(tokens, columns).to(dtype)
            result = groupwise.linear(hidden, matrix, bias)
            expected = reference.linear(hidden, matrix, bias)
            assert result.shape == (tokens, rows)
            if tokens:
                close(result, expected)
            sums = groupwise.linear(hidden, matrix, output_dtype=torch.float32)
            assert torch.equal(sums.to(dtype), groupwise.linear(hidden, matrix))


@pytest.mark.parametrize("bits", [4, 8])
def test_more_tokens_than_a_unit(isa: str, bits: int) -> None:
    matrix = random_matrix(40, 64, bits, 32)
    hidden = torch.randn(300, 64)
    close(groupwise.linear(hidden, matrix), reference.linear(hidden, matrix))


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_and_rows(isa: str, bits: int) -> None:
    for rows, columns, group_size in SHAPES:
        groups = -(-columns // group_size)
        codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
        zeros = torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8)
        scales = torch.rand(rows, groups).half()
        matrix = groupwise.pack(codes, scales, zeros, bits, group_size)
        expected = torch.empty(rows, columns)
        for column in range(columns):
            group = column // group_size
            difference = codes[:, column].float() - zeros[:, group].float()
            expected[:, column] = difference * scales[:, group].float()
        assert torch.equal(reference.dequantize(matrix).float(), expected)
        wanted = torch.randint(0, rows, (30,))
        for dtype in DTYPES:
            rows_of = groupwise.look_up(matrix, wanted, dtype)
            assert torch.equal(rows_of, expected[wanted].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_does_not_depend_on_those_beside_it(
    isa: str, dtype: torch.dtype, bits: int
) -> None:
    matrix, hidden = random_matrix(100, 72, bits, 24), torch.randn(301, 72).to(dtype)
    alone = torch.cat([groupwise.linear(row, matrix) for row in hidden[::50].split(1)])
    assert torch.equal(groupwise.linear(hidden, matrix)[::50], alone)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_the_activations_changes_little(isa: str, bits: int) -> None:
    matrix, hidden = random_matrix(64, 1024, bits, 128), torch.randn(8, 1024)
    hidden[:, 5] *= 50  # an outlier spoils its own chunk alone
    exact = hidden.double() @ reference.dequantize(matrix).T
    error = (groupwise.linear(hidden, matrix).double() - exact).square().mean().sqrt()
    assert error < 0.04 * exact.std()


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_extreme_codes_and_activations_are_exact(isa: str, bits: int) -> None:
    """Products of bytes would saturate if too many of them were added in 16 bits."""
    for columns, group_size in ((256, 128), (200, 200), (40, 40), (96, 8), (120, 24)):
        codes = torch.full((50, columns), (1 << bits) - 1, dtype=torch.uint8)
        codes[1::3] = 0
        codes[2::3] *= torch.randint(0, 2, (columns,), dtype=torch.uint8)
        groups = -(-columns // group_size)
        zeros = torch.randint(0, 2, (50, groups), dtype=torch.uint8) * codes.max()
        matrix = groupwise.pack(codes, torch.ones(50, groups).half(), zeros, bits, group_size)
        weights = reference.dequantize(matrix)
        for tokens in (1, 3, 4, 8, 9, 30):
            signs = torch.randint(0, 2, (tokens, columns)) * 2 - 1
            signs[0::3], signs[1::3] = 1, -1
            hidden = signs * 127.0  # activation scales are 1
            expected = hidden.double() @ weights.T
            assert expected.abs().max() < 1 << 24  # float32 has every sum
            assert torch.equal(groupwise.linear(hidden, matrix).double(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes(isa: str, bits: int) -> None:
    matrix = random_matrix(20, 40, bits, 40)
    hidden = torch.randn(6, 40)
    usual = groupwise.linear(hidden, matrix)
    hidden[0, 3], hidden[1, 39], hidden[2, 20] = torch.nan, torch.inf, -torch.inf
    hidden[3] = 0
    hidden[4] = 1e-42
    result = groupwise.linear(hidden, matrix)
    assert result[:3].isnan().all()
    assert (result[3] == 0).all()
    assert (result[4].abs() < 1e-37).all()
    assert torch.equal(result[5], usual[5])


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call that is in order but for ``changes``: 33 by 24, groups of 8, 4 bits."""
    matrix = random_matrix(33, 24, 4, 8)
    return {
        "hidden": torch.zeros(2, 24),
        "codes": matrix.codes,
        "scales": matrix.scales,
        "zeros": matrix.zeros,
        "rows": 33,
        "bits": 4,
        "group_size": 8,
        "bias": None,
        "output": torch.zeros(2, 33),
        **changes,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(2, 40)}, "codes must be"),
    ({"hidden": torch.zeros(24)}, "hidden must be"),
    ({"hidden": torch.zeros(2, 24, dtype=torch.int32)}, "hidden"),
    ({"rows": 49}, "codes must be"),
    ({"rows": 0}, "positive"),
    ({"bits": 8}, "codes must be"),
    ({"bits": 3}, "4 or 8"),
    ({"group_size": 16}, "scales must be"),
    ({"group_size": 12}, "multiple of 8"),
    ({"group_size": 0}, "multiple of 8"),
    ({"scales": torch.zeros(3, 3, 16)}, "scales must be"),
    ({"zeros": torch.zeros(3, 2, 16, dtype=torch.uint8)}, "zeros must be"),
    ({"codes": torch.zeros(3, 3, 16, 4, dtype=torch.int32)}, "codes must be"),
    ({"bias": torch.zeros(32)}, "bias must be"),
    ({"bias": torch.zeros(33).half()}, "bias must be"),
    ({"output": torch.zeros(3, 33)}, "output must be"),
    ({"output": torch.zeros(2, 33).half()}, "output must be"),
    ({"hidden": torch.zeros(2, 24).half(), "bias": torch.zeros(33).half()}, "output must be"),
]


def test_the_call_that_the_refused_ones_change_is_in_order(isa: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    native.groupwise_linear(**arguments())


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(isa: str, changes: dict[str, Any], message: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    with pytest.raises((ValueError, TypeError), match=message):
        native.groupwise_linear(**arguments(**changes))


@pytest.mark.parametrize("wanted", [[-1], [33]])
def test_rows_that_are_not_there_are_refused(isa: str, wanted: list[int]) -> None:
    with pytest.raises(ValueError, match="from 0 to rows - 1"):
        groupwise.look_up(random_matrix(33, 24, 4, 8), torch.tensor(wanted), torch.float32)
