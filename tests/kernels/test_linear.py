"""Linear layers of packed matrices are what torch computes, for every shape, dtype and instruction
set."""

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import linear
from radixrt_kernels.reference import linear as reference

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""And what one rounding changes."""

SHAPES = [(1, 1), (1, 2), (15, 3), (16, 16), (17, 31), (64, 32), (65, 33), (130, 64), (200, 129)]
"""Rows and columns: below, at and above panels (16), units (64) and pairs."""


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[result.dtype]
    scale = float(expected.double().abs().max())
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_is_what_torch_computes(isa: str, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns).to(dtype)
        packed = linear.pack(weight)
        for tokens in (0, 1, 2, 5, 6, 7, 13, 16, 33, 40):
            hidden = torch.randn(tokens, columns).to(dtype)
            expected = (hidden.double() @ weight.double().T).to(dtype)
            if tokens:
                close(linear.linear(hidden, packed, rows), expected)
            else:
                assert linear.linear(hidden, packed, rows).shape == (0, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_columns_than_a_block_and_more_tokens_than_a_unit(
    isa: str, dtype: torch.dtype
) -> None:
    for rows, columns, tokens in [(80, 9001, 3), (16, 4098, 300), (40, 2050, 7)]:
        weight, hidden = (
            torch.randn(rows, columns).to(dtype),
            torch.randn(tokens, columns).to(dtype),
        )
        expected = (hidden.double() @ weight.double().T).to(dtype)
        close(linear.linear(hidden, linear.pack(weight), rows), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bias_is_added_before_rounding(isa: str, dtype: torch.dtype) -> None:
    weight, bias, hidden = torch.randn(37, 20), torch.randn(37), torch.randn(4, 20)
    weight, bias, hidden = weight.to(dtype), bias.to(dtype), hidden.to(dtype)
    packed = linear.pack(weight)
    expected = (hidden.double() @ weight.double().T + bias.double()).to(dtype)
    close(linear.linear(hidden, packed, 37, bias), expected)
    close(reference.linear(hidden, packed, 37, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_need_not_be_rounded(isa: str, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        packed = linear.pack(torch.randn(rows, columns).to(dtype))
        bias = torch.randn(rows).to(dtype)
        for tokens in (1, 5, 7, 40):
            hidden = torch.randn(tokens, columns).to(dtype)
            for added in (None, bias):
                sums = linear.linear(hidden, packed, rows, added, torch.float32)
                close(sums, reference.linear(hidden, packed, rows, added, torch.float32))
                assert torch.equal(sums.to(dtype), linear.linear(hidden, packed, rows, added))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns).to(dtype)
        packed = linear.pack(weight)
        assert torch.equal(reference.unpack(packed, rows, columns), weight)
        wanted = torch.randint(0, rows, (50,))
        assert torch.equal(linear.look_up(packed, rows, columns, wanted), weight[wanted])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_those_beside_it(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit: the same sums in the same order, whatever the batch."""
    packed, hidden = linear.pack(torch.randn(100, 70).to(dtype)), torch.randn(301, 70).to(dtype)
    alone = torch.cat([linear.linear(row, packed, 100) for row in hidden[::50].split(1)])
    assert torch.equal(linear.linear(hidden, packed, 100)[::50], alone)


def test_rows_of_a_wider_matrix_are_taken_as_they_lie(isa: str) -> None:
    wide, weight = torch.randn(9, 100), torch.randn(33, 20)
    expected = wide[:, 3:23] @ weight.T
    close(linear.linear(wide[:, 3:23], linear.pack(weight), 33), expected)


def test_infinities_and_nans_stay_in_their_rows_and_tokens(isa: str) -> None:
    """What fills up panels and pairs is never mixed in."""
    for dtype in DTYPES:
        weight, hidden = torch.ones(17, 3).to(dtype), torch.ones(3, 3).to(dtype)
        weight[16] = torch.inf
        hidden[1] = torch.nan
        result = linear.linear(hidden, linear.pack(weight), 17)
        assert result[1].isnan().all()
        assert result[::2, 16].isinf().all()
        assert (result[::2, :16] == 3).all()


@pytest.mark.parametrize(
    ("hidden", "rows", "bias", "message"),
    [
        (torch.zeros(2, 21), 33, None, "packed form of a matrix"),
        (torch.zeros(2, 20), 64, None, "packed form of a matrix"),
        (torch.zeros(2, 20), 0, None, "packed form of a matrix"),
        (torch.zeros(20), 33, None, "hidden must be"),
        (torch.zeros(20, 2).T, 33, None, "without gaps"),
        (torch.zeros(2, 20).half(), 33, None, "weights' dtype"),
        (torch.zeros(2, 20), 33, torch.zeros(32), "bias must be"),
        (torch.zeros(2, 20), 33, torch.zeros(33).half(), "bias must be"),
        (torch.zeros(2, 20, device="meta"), 33, None, "CPU"),
    ],
)
def test_what_does_not_fit_is_refused(
    isa: str, hidden: torch.Tensor, rows: int, bias: torch.Tensor | None, message: str
) -> None:
    packed = linear.pack(torch.zeros(33, 20))
    native = radixrt_kernels.native
    assert native is not None
    with pytest.raises((ValueError, TypeError), match=message):
        native.linear(hidden, packed, rows, bias, torch.zeros(2, rows))


@pytest.mark.parametrize("output", [torch.zeros(3, 33), torch.zeros(2, 32), torch.zeros(33, 2).T])
def test_an_output_of_another_shape_is_refused(isa: str, output: torch.Tensor) -> None:
    native = radixrt_kernels.native
    assert native is not None
    with pytest.raises(ValueError, match="output must be"):
        native.linear(torch.zeros(2, 20), linear.pack(torch.zeros(33, 20)), 33, None, output)


@pytest.mark.parametrize("wanted", [[-1], [33], [0, 40]])
def test_rows_that_are_not_there_are_refused(isa: str, wanted: list[int]) -> None:
    packed = linear.pack(torch.zeros(33, 20))
    with pytest.raises(ValueError, match="from 0 to rows - 1"):
        linear.look_up(packed, 33, 20, torch.tensor(wanted))
