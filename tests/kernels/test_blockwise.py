"""Packed GGUF blocks are gguf's weights bit for bit, and multiply as decoding and multiplying do,
on every instruction set."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import radixrt_kernels
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt_kernels import blockwise, tape
from radixrt_kernels.reference import blockwise as reference
from tests.kernels.conftest import ISAS
from tests.kernels.test_groupwise import DTYPES, close

gguf = pytest.importorskip("gguf")

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""By kind, the float16 numbers of a block, at bytes."""
KINDS = list(HALVES)

SHAPES = [(1, 256), (16, 512), (33, 768), (70, 2304), (130, 256)]
"""Rows and columns: partial panels, single ones and four together; more blocks than are unpacked at
once."""
SMALL_SHAPES = [(5, 32), (17, 160), (64, 640), (81, 288)]
"""Of kinds with blocks of 32: rows that are no multiple of 256."""


def random_blocks(kind: str, rows: int, columns: int, largest: float = 1.0) -> torch.Tensor:
    """Rows of blocks of random bytes, with scales up to ``largest``: uint8 [rows, bytes of a
    row]."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = torch.randint(0, 256, (rows, columns // block, size), dtype=torch.uint8)
    for at in HALVES.get(kind, []):
        scales = (torch.rand(rows, columns // block, 1) * 2 - 1).mul(largest).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 120
    if kind == "NVFP4":  # 8 bits of a float, four times
        blocks[..., :4] = 0x08
    return blocks.flatten(1)


def decoded(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """The weights by gguf's own dequantization: float32 [rows, columns]."""
    weights = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(weights.copy())


def pack(kind: str, blocks: torch.Tensor, columns: int) -> blockwise.PackedBlocks:
    number = int(gguf.GGMLQuantizationType[kind])
    return blockwise.pack(blocks, number, len(blocks), columns)


def random_matrix(kind: str, rows: int, columns: int) -> blockwise.PackedBlocks:
    return pack(kind, random_blocks(kind, rows, columns), columns)


def shapes_of(kind: str) -> list[tuple[int, int]]:
    block = BLOCK_KINDS[gguf.GGMLQuantizationType[kind]].columns
    return SHAPES + (SMALL_SHAPES if block == 32 else [])


def same_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@functools.cache
def looked_up(
    kind: str, rows: int, columns: int, largest: float
) -> tuple[blockwise.PackedBlocks, torch.Tensor, torch.Tensor]:
    """A matrix, numbers of rows, and those rows by gguf: the same for each instruction set."""
    blocks = random_blocks(kind, rows, columns, largest)
    if kind == "MXFP4":
        blocks.view(rows, -1, 17)[:, 0, 0] = torch.randint(0, 250, (rows,))
    expected, matrix = decoded(kind, blocks), pack(kind, blocks, columns)
    assert same_bits(reference.dequantize(matrix), expected)
    wanted = torch.randint(0, rows, (30,))
    return matrix, wanted, expected[wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_bit_equal_to_ggufs(isa: str, kind: str) -> None:
    for rows, columns in shapes_of(kind):
        for largest in (1.0, 6e-8, 65504.0):  # also subnormal scales
            matrix, wanted, expected = looked_up(kind, rows, columns, largest)
            for dtype in DTYPES:
                rows_of = blockwise.look_up(matrix, wanted, dtype)
                assert same_bits(rows_of, expected.to(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_what_gguf_quantizes_is_decoded_bit_for_bit(isa: str, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    quantized = gguf.quantize(np.random.default_rng(1).normal(size=(70, 640)), number)
    matrix = blockwise.pack(torch.from_numpy(quantized), int(number), 70, 640)
    expected = torch.from_numpy(gguf.dequantize(quantized, number).copy())
    assert same_bits(blockwise.look_up(matrix, torch.arange(70), torch.float32), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_takes_little_more_than_in_the_file(kind: str) -> None:
    """A tenth; of IQ2 and IQ3 kinds, at most four and a half bits a weight."""
    block = BLOCK_KINDS[gguf.GGMLQuantizationType[kind]]
    for rows, columns in ((640, 768), (2048, 256), (896, 4864)):
        blocks = random_blocks(kind, rows, columns)
        most = 4.5 * rows * columns / 8 if kind[:3] in ("IQ2", "IQ3") else 1.1 * blocks.numel()
        size = pack(kind, blocks, columns).packed.numel()
        assert rows * columns // block.columns * block.packed_bytes <= size <= most


@functools.cache
def multiplied(
    kind: str, dtype: torch.dtype, rows: int, columns: int
) -> tuple[blockwise.PackedBlocks, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A matrix, a bias, and inputs of some lengths with what the reference gives: the same for each
    instruction set."""
    matrix, bias = random_matrix(kind, rows, columns), torch.randn(rows).to(dtype)
    inputs = [torch.randn(tokens, columns).to(dtype) for tokens in (0, 1, 2, 5, 7, 20)]
    return matrix, bias, [(hidden, reference.linear(hidden, [matrix], bias)) for hidden in inputs]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(d, k) for k in KINDS for d in DTYPES if d == torch.bfloat16 or k in ("Q4_0", "Q5_K", "Q6_K")],
    ids=str,
)
def test_every_shape_is_what_decoding_and_multiplying_give(
    isa: str, dtype: torch.dtype, kind: str
) -> None:
    for rows, columns in shapes_of(kind):
        matrix, bias, cases = multiplied(kind, dtype, rows, columns)
        for hidden, expected in cases:
            result = blockwise.linear(hidden, [matrix], bias)
            assert result.shape == (len(hidden), rows)
            if len(hidden):
                close(result, expected)
            sums = blockwise.linear(hidden, [matrix], output_dtype=torch.float32)
            assert torch.equal(sums.to(dtype), blockwise.linear(hidden, [matrix]))


def test_matrices_of_different_kinds_side_by_side(isa: str) -> None:
    matrices = [random_matrix(kind, 10 + 16 * i, 512) for i, kind in enumerate(KINDS)]
    hidden, bias = torch.randn(300, 512), torch.randn(sum(m.rows for m in matrices))
    close(blockwise.linear(hidden, matrices, bias), reference.linear(hidden, matrices, bias))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_those_beside_it_or_on_threads(isa: str, kind: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    matrix, hidden = random_matrix(kind, 150, 2560), torch.randn(301, 2560).bfloat16()
    before, results = native.num_threads(), []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            alone = [blockwise.linear(row, [matrix]) for row in hidden[::50].split(1)]
            results += [torch.cat(alone), blockwise.linear(hidden, [matrix])[::50]]
            results += [blockwise.linear(hidden[::50], [matrix])]
            results += [torch.cat([blockwise.linear(h, [matrix]) for h in hidden[::50].split(3)])]
    finally:
        native.set_num_threads(before)
    for result in results[1:]:
        assert same_bits(result, results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_the_activations_changes_little(isa: str, kind: str) -> None:
    matrix, hidden = random_matrix(kind, 64, 1024), torch.randn(8, 1024)
    hidden[:, 5] *= 50  # an outlier spoils its own 32 columns alone
    exact = hidden.double() @ reference.dequantize(matrix).double().T
    error = (blockwise.linear(hidden, [matrix]).double() - exact).square().mean().sqrt()
    assert error < 0.02 * exact.std()


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(isa: str, kind: str) -> None:
    matrix = random_matrix(kind, 20, 256)
    hidden = torch.randn(8, 256)
    usual = blockwise.linear(hidden, [matrix])
    hidden[0, 3], hidden[1, 255], hidden[2, 20] = torch.nan, torch.inf, -torch.inf
    hidden[3] = 0
    hidden[4] = 1e-42
    for tokens in (5, 8):  # one tile, and several
        result = blockwise.linear(hidden[:tokens], [matrix])
        assert result[:3].isnan().all()
        assert (result[3] == 0).all()
        assert (result[4].abs() < 1e-34).all()
        assert same_bits(result[5:], usual[5:tokens])


def extreme_blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Rows of the largest codes, of the smallest codes, of both mixed, and of random ones; scales
    are 1."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = torch.randint(0, 256, (rows, columns // block, size), dtype=torch.uint8)
    blocks[0::4], blocks[1::4] = 0xFF, 0
    blocks[2::4] = torch.randint(0, 2, (size,), dtype=torch.uint8).mul(0xFF)
    if kind == "Q8_0":
        blocks[0::4], blocks[1::4] = 0x7F, 0x80  # signed codes
    if kind == "MXFP4":
        blocks[0::4], blocks[1::4], blocks[..., 0] = 0x77, 0xFF, 127
    for first, last, value in UNIT_SCALES.get(kind, []):
        blocks[..., first:last] = value
    if kind in ("IQ2_XXS", "IQ3_XXS"):  # four bits above those of 28 signs
        blocks[..., slice(9, None, 8) if kind == "IQ2_XXS" else slice(69, None, 4)] &= 0x0F
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    return blocks.flatten(1)


UNIT_SCALES = {
    "Q2_K": [(0, 16, 1)], "Q3_K": [(96, 104, 0x11), (104, 108, 0xAA)], "Q4_K": [(4, 16, 1)], "Q5_K": [(4, 16, 1)], "Q6_K": [(192, 208, 1)],
    "IQ2_XS": [(66, 74, 0)], "IQ2_S": [(74, 82, 0)], "IQ3_S": [(106, 110, 0)], "IQ4_XS": [(2, 4, 0xAA), (4, 8, 0x11)],
}  # fmt: skip
"""Bytes of a block that make the scales of its parts 1 or small: first, last, value."""


def extreme_activations(tokens: int, columns: int) -> torch.Tensor:
    """127 and -127, so that activation scales are 1: all of one sign, alternating, and random."""
    signs = torch.randint(0, 2, (tokens, columns)) * 2 - 1
    signs[0::4] = 1
    signs[1::4] = -1
    signs[2::4, 0::2], signs[2::4, 1::2] = 1, -1
    return signs * 127.0


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_extreme_codes_and_activations_are_exact(isa: str, kind: str) -> None:
    """Products of bytes would saturate if too many of them were added in 16 bits."""
    matrix = pack(kind, extreme_blocks(kind, 50, 512), 512)
    weights = reference.dequantize(matrix).double()
    for tokens in (1, 3, 4, 8, 9, 30):
        hidden = extreme_activations(tokens, 512)
        expected = hidden.double() @ weights.T
        assert expected.abs().max() < 1 << 24  # float32 has every sum
        assert torch.equal(blockwise.linear(hidden, [matrix]).double(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_vector_instruction_sets_give_the_same_bits(kind: str) -> None:
    native = radixrt_kernels.native
    if native is None:
        pytest.skip("no native kernels")
    matrix, hidden = random_matrix(kind, 100, 768), torch.randn(21, 768)
    before, results = native.isa(), []
    try:
        for isa in ISAS:
            native.use_isa(isa)
            if isa != "baseline":  # rounds products before it adds them
                results += [blockwise.linear(h, [matrix]) for h in (hidden, hidden[:5])]
    finally:
        native.use_isa(before)
    for result in results:
        assert same_bits(result, results[0][: len(result)])


def test_missing_rows_are_zeros(isa: str) -> None:
    blocks = random_blocks("Q8_0", 20, 64)
    matrix = blockwise.pack(blocks, 8, rows=40, columns=64)
    assert (blockwise.look_up(matrix, torch.arange(20, 40), torch.float32) == 0).all()
    assert (blockwise.linear(torch.randn(3, 64), [matrix])[:, 20:] == 0).all()


def test_a_part_of_the_columns(isa: str) -> None:
    """Of a tensor-parallel rank: rows have gaps in the file."""
    blocks = random_blocks("Q4_0", 30, 256)
    part = pack("Q4_0", blocks[:, 18 * 3 : 18 * 7], 128)
    assert same_bits(reference.dequantize(part), decoded("Q4_0", blocks)[:, 96:224].contiguous())


def test_a_tape_repeats_both_operations(isa: str) -> None:
    embedding, head = random_matrix("Q5_0", 50, 256), random_matrix("Q6_K", 50, 256)

    def compute(ids: torch.Tensor) -> torch.Tensor:
        return blockwise.linear(blockwise.look_up(embedding, ids, torch.bfloat16), [head])

    with torch.inference_mode():
        tapes = tape.Tapes(compute, torch.arange(1))
    ids = torch.tensor([49, 3, 3, 17, 20])
    assert torch.equal(tapes.of(5).replay(ids), compute(ids))


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call that is in order but for ``changes``: 33 by 256 in Q4_K."""
    return {
        "hidden": torch.zeros(2, 256),
        "matrices": ((random_matrix("Q4_K", 33, 256).packed, 12, 33),),
        "bias": None,
        "output": torch.zeros(2, 33),
        **changes,
    }


PACKED = torch.zeros(3, 2368, dtype=torch.uint8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(2, 288)}, "whole blocks"),
    ({"hidden": torch.zeros(2, 512)}, "packed must be"),
    ({"hidden": torch.zeros(256)}, "hidden must be"),
    ({"hidden": torch.zeros(2, 256, dtype=torch.int32)}, "hidden"),
    ({"matrices": ((PACKED, 12, 49),)}, "packed must be"),
    ({"matrices": ((PACKED, 12, 0),)}, "positive"),
    ({"matrices": ((PACKED, 14, 33),)}, "packed must be"),
    ({"matrices": ((PACKED, 19, 33),)}, "no packed form of GGUF's kind 19"),
    ({"matrices": ((PACKED.float(), 12, 33),)}, "packed must be"),
    ({"matrices": (PACKED,)}, "must be tuples"),
    ({"matrices": ((PACKED, 12, 33), (PACKED, 12, 33))}, "output must be"),
    ({"bias": torch.zeros(32)}, "bias must be"),
    ({"bias": torch.zeros(33).half()}, "bias must be"),
    ({"output": torch.zeros(3, 33)}, "output must be"),
    ({"output": torch.zeros(2, 33).half()}, "output must be"),
    ({"hidden": torch.zeros(2, 256).half(), "bias": torch.zeros(33).half()}, "output must be"),
]


def test_the_call_that_the_refused_ones_change_is_in_order(isa: str) -> None:
    native = radixrt_kernels.native
    assert native is not None
    native.blockwise_linear(**arguments())


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    native = radixrt_kernels.native
    if native is None:
        pytest.skip("no native kernels")
    with pytest.raises((ValueError, TypeError), match=message):
        native.blockwise_linear(**arguments(**changes))


@pytest.mark.parametrize(
    ("blocks", "rows", "columns", "message"),
    [
        (torch.zeros(4, 34), 4, 32, "blocks must be"),
        (torch.zeros(4, 34, dtype=torch.uint8), 4, 64, "blocks must be"),
        (torch.zeros(40, 34, dtype=torch.uint8), 32, 32, "packed must be"),
        (torch.zeros(4, 34, dtype=torch.uint8), 4, 48, "whole blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_not_packed(
    blocks: torch.Tensor, rows: int, columns: int, message: str
) -> None:
    if radixrt_kernels.native is None:
        pytest.skip("no native kernels")
    with pytest.raises(ValueError, match=message):
        blockwise.pack(blocks, 8, rows, columns)


@pytest.mark.parametrize("wanted", [[-1], [33]])
def test_rows_that_are_not_there_are_refused(isa: str, wanted: list[int]) -> None:
    matrix = random_matrix("Q5_K", 33, 256)
    with pytest.raises(ValueError, match="from 0 to rows - 1"):
        blockwise.look_up(matrix, torch.tensor(wanted), torch.float32)
