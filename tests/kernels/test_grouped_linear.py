"""Rows that each have a matrix of their own are multiplied as if it were the only one, whatever the
groups."""

from typing import Any

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import blockwise, groupwise, linear
from radixrt_kernels.reference import blockwise as reference_blockwise
from radixrt_kernels.reference import groupwise as reference_groupwise
from radixrt_kernels.reference import linear as reference_linear
from tests.kernels.test_blockwise import random_blocks

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""And what one rounding changes."""

COUNTS = [
    [1],
    [0],
    [0, 1, 0],
    [1, 1, 1, 1],
    [0, 0, 5, 2, 0, 13, 1],
    [64, 0, 0, 0],
    [0, 300, 3],
]
"""Rows of each matrix: none at all, empty ones, one that has all, more than a unit."""

SHAPES = [(1, 1), (16, 16), (17, 31), (65, 34), (200, 136)]
"""Rows and columns of a matrix: below, at and above panels (16), units (64) and pairs."""


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def some_tokens(counts: list[int], num_tokens: int) -> torch.Tensor:
    return torch.randint(0, num_tokens, (sum(counts),), dtype=torch.int32)


def random_stack(count: int, rows: int, columns: int, bits: int) -> groupwise.PackedCodes:
    size = 32 if bits == 4 else max(columns, 8)
    groups = -(-columns // size)

    def one(_: int) -> groupwise.PackedCodes:
        codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
        zeros = torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8)
        return groupwise.pack(codes, torch.rand(rows, groups).half(), zeros, bits, size)

    return groupwise.stack(one, count)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    if expected.numel():
        tolerance, scale = DTYPES[result.dtype], float(expected.double().abs().max())
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_plain_weights(isa: str, counts: list[int], dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        matrices = torch.randn(len(counts), rows, columns).to(dtype)
        hidden, tokens = torch.randn(7, columns).to(dtype), some_tokens(counts, 7)
        packed, starts = linear.pack_stack(matrices), starts_of(counts)
        inputs = hidden[tokens.long()]
        expected = [
            own.double() @ matrix.double().T
            for own, matrix in zip(inputs.split(counts), matrices, strict=True)
        ]
        exact = torch.cat(expected).to(dtype)
        close(linear.grouped_linear(hidden, tokens, starts, packed, rows), exact)
        close(linear.grouped_linear(inputs, None, starts, packed, rows), exact)
        close(reference_linear.grouped_linear(hidden, tokens, starts, packed, rows), exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_codes(isa: str, counts: list[int], dtype: torch.dtype, bits: int) -> None:
    for rows, columns in SHAPES:
        stack = random_stack(len(counts), rows, columns, bits)
        hidden, tokens = torch.randn(7, columns).to(dtype), some_tokens(counts, 7)
        starts = starts_of(counts)
        expected = reference_groupwise.grouped_linear(hidden, tokens, starts, stack)
        close(groupwise.grouped_linear(hidden, tokens, starts, stack), expected)
        inputs = hidden[tokens.long()]
        close(groupwise.grouped_linear(inputs, None, starts, stack), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_tokens_gives_the_bits_of_the_plain_product(
    isa: str, dtype: torch.dtype
) -> None:
    """So a token's answer does not depend on who else is in the batch, nor on where they go."""
    count, rows, columns = 5, 80, 66
    packed = linear.pack_stack(torch.randn(count, rows, columns).to(dtype))
    stack = random_stack(count, rows, columns, 4)
    for num_tokens in range(1, 65, 7):
        hidden = torch.randn(num_tokens, columns).to(dtype)
        owner = torch.randint(0, count, (num_tokens,)).sort().values
        starts = starts_of(owner.bincount(minlength=count).tolist())
        plain = linear.grouped_linear(hidden, None, starts, packed, rows)
        coded = groupwise.grouped_linear(hidden, None, starts, stack)
        for index in range(count):
            own = owner == index
            alone = linear.linear(hidden[own], packed[index], rows)
            assert torch.equal(plain[own], alone)
            matrix = reference_groupwise.matrix_of(stack, index)
            assert torch.equal(coded[own], groupwise.linear(hidden[own], matrix))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS[2::2], ids=str)
def test_blocks(isa: str, counts: list[int], dtype: torch.dtype) -> None:
    """Of the bits of the plain product with each matrix, whose kinds have tests of their own."""
    for kind, rows, columns in (("MXFP4", 33, 96), ("Q4_K", 80, 256), ("Q8_0", 16, 32)):
        number = getattr(reference_blockwise, kind)
        blocks = random_blocks(kind, len(counts) * rows, columns).unflatten(0, (len(counts), rows))
        stack = blockwise.pack_stack(blocks, number, columns)
        hidden, tokens = torch.randn(7, columns).to(dtype), some_tokens(counts, 7)
        inputs = hidden[tokens.long()]
        alone = [
            blockwise.linear(own, [blockwise.pack(matrix, number, rows, columns)])
            for own, matrix in zip(inputs.split(counts), blocks, strict=True)
        ]
        starts, expected = starts_of(counts), torch.cat(alone)
        assert torch.equal(blockwise.grouped_linear(hidden, tokens, starts, stack), expected)
        assert torch.equal(blockwise.grouped_linear(inputs, None, starts, stack), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_matrix_adds_its_bias(isa: str, dtype: torch.dtype) -> None:
    counts, rows, columns = [2, 0, 5, 70], 33, 32
    starts, hidden = starts_of(counts), torch.randn(77, columns).to(dtype)
    bias = torch.randn(len(counts), rows).to(dtype)
    added = bias.repeat_interleave(torch.tensor(counts), dim=0).float()
    packed = linear.pack_stack(torch.randn(len(counts), rows, columns).to(dtype))
    codes = random_stack(len(counts), rows, columns, 4)
    blocks = random_blocks("MXFP4", len(counts) * rows, columns).unflatten(0, (-1, rows))
    stack = blockwise.pack_stack(blocks, reference_blockwise.MXFP4, columns)
    for multiply in (
        lambda *of: linear.grouped_linear(hidden, None, starts, packed, rows, *of),
        lambda *of: groupwise.grouped_linear(hidden, None, starts, codes, *of),
        lambda *of: blockwise.grouped_linear(hidden, None, starts, stack, *of),
    ):
        plain = multiply().float()
        tolerance = 2 * DTYPES[dtype]
        atol = tolerance * float(plain.abs().max())
        torch.testing.assert_close(multiply(bias).float(), plain + added, rtol=0, atol=atol)
    with pytest.raises(ValueError, match=r"bias must be \[matrices, rows\]"):
        linear.grouped_linear(hidden, None, starts, packed, rows, bias[1:])


def test_a_stack_of_packed_matrices_is_each_of_them_packed() -> None:
    weights = torch.randn(3, 33, 20)
    for dtype in DTYPES:
        packed = linear.pack_stack(weights.to(dtype))
        for weight, part in zip(weights.to(dtype), packed, strict=True):
            assert torch.equal(linear.pack(weight), part)


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call that is in order but for ``changes``: three matrices of 33 by 20, five rows of two
    tokens."""
    return {
        "hidden": torch.zeros(2, 20),
        "tokens": torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32),
        "starts": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
        "weights": linear.pack_stack(torch.zeros(3, 33, 20)),
        "rows": 33,
        "output": torch.zeros(5, 33),
        **changes,
    }


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": int32(0, 1, 2, 0, 1)}, "from 0 to hidden's rows - 1"),
    ({"tokens": int32(0, 1, -1, 0, 1)}, "from 0 to hidden's rows - 1"),
    ({"tokens": torch.tensor([0, 1, 1, 0, 1])}, "tokens must be"),
    ({"tokens": None}, "starts must begin"),
    ({"starts": int32(0, 2, 2, 4)}, "starts must begin"),
    ({"starts": int32(1, 2, 2, 5)}, "starts must begin"),
    ({"starts": int32(0, 3, 2, 5)}, "starts must not descend"),
    ({"starts": int32(0, -2, 2, 5)}, "starts must not descend"),
    ({"starts": torch.tensor([0, 2, 2, 5])}, "starts must be"),
    ({"starts": int32(0, 2, 5)}, "packed form"),
    ({"starts": int32(5)}, "starts must be"),
    ({"hidden": torch.zeros(2, 21)}, "packed form"),
    ({"hidden": torch.zeros(2, 20).half()}, "weights' dtype"),
    ({"rows": 49}, "packed form"),
    ({"output": torch.zeros(4, 33)}, "output must be"),
    ({"output": torch.zeros(5, 32)}, "output must be"),
]


def test_the_call_that_the_refused_ones_change_is_in_order(isa: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    native.grouped_linear(**arguments())


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(isa: str, changes: dict[str, Any], message: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    with pytest.raises(ValueError, match=message):
        native.grouped_linear(**arguments(**changes))


@pytest.mark.parametrize(
    ("starts", "rows", "output", "message"),
    [
        (int32(0, 2, 5), 33, torch.zeros(5, 33), "codes must be"),
        (int32(0, 2, 2, 5), 49, torch.zeros(5, 49), "codes must be"),
        (int32(0, 6, 2, 5), 33, torch.zeros(5, 33), "starts must not descend"),
        (int32(0, 2, 2, 5), 33, torch.zeros(6, 33), "output must be"),
    ],
)
def test_codes_that_do_not_fit_are_refused(
    isa: str, starts: torch.Tensor, rows: int, output: torch.Tensor, message: str
) -> None:
    native = radixrt_kernels.native
    assert native is not None
    s = random_stack(3, 33, 40, 4)
    hidden = torch.zeros(5, 40)
    with pytest.raises(ValueError, match=message):
        native.grouped_groupwise_linear(
            hidden, None, starts, s.codes, s.scales, s.zeros, rows, 4, s.group_size, output
        )
