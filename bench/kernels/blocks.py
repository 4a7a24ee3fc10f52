"""``python -m bench.kernels.blocks [--isas avx2 avx512]``: products with GGUF's packed blocks beside
bfloat16, int8 and int4.

All forms and instruction sets alternate in each round, so that their ratios are of the same minutes
of the machine. Times are CPU times of one thread, which other processes change least.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from statistics import median

import torch

import radixrt_kernels
from bench.kernels.linear import BLOCK_SHAPES, DTYPE, NOT_IN_CACHE, random_blocks
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.worker.threads import use_threads
from radixrt_kernels import blockwise, groupwise, linear
from radixrt_kernels.memory import Slabs

SECONDS_A_TURN = 0.01
"""CPU time for which a form repeats a product before the next form has its turn."""

Product = Callable[[torch.Tensor], torch.Tensor]


def forms(rows: int, columns: int, wanted: list[str]) -> dict[str, list[tuple[Product, int]]]:
    """By name, products with matrices that are together larger than the cache, and their bytes of
    weights."""
    makers: dict[str, Callable[[Slabs], tuple[Product, int]]] = {
        "bfloat16": partial(_plain, rows, columns),
        "int8": partial(_groupwise, rows, columns, 8, columns),
        "int4": partial(_groupwise, rows, columns, 4, 128),
    }
    for number, kind in BLOCK_KINDS.items():
        makers[kind.name] = partial(_blockwise, rows, columns, number)
    makers = {n: m for n, m in makers.items() if n == "bfloat16" or not wanted or n in wanted}
    made = {}
    for name, make in makers.items():
        memory = Slabs()
        made[name] = [make(memory)]
        made[name] += [make(memory) for _ in range(max(2, NOT_IN_CACHE // made[name][0][1]) - 1)]
    return made


def _plain(rows: int, columns: int, _memory: Slabs) -> tuple[Product, int]:
    packed = linear.pack(torch.randn(rows, columns).to(DTYPE))
    return lambda hidden: linear.linear(hidden, packed, rows), packed.nbytes


def _groupwise(
    rows: int, columns: int, bits: int, group_size: int, _memory: Slabs
) -> tuple[Product, int]:
    groups = -(-columns // group_size)
    codes, zeros = (
        torch.randint(0, 1 << bits, (rows, count), dtype=torch.uint8) for count in (columns, groups)
    )
    m = groupwise.pack(codes, torch.rand(rows, groups).half(), zeros, bits, group_size)
    num_bytes = sum(part.nbytes for part in (m.codes, m.scales, m.zeros))
    return lambda hidden: groupwise.linear(hidden, m), num_bytes


def _blockwise(rows: int, columns: int, kind: int, memory: Slabs) -> tuple[Product, int]:
    blocks = random_blocks(kind, rows, columns)
    matrix = blockwise.pack(blocks, kind, rows, columns, memory)
    return lambda hidden: blockwise.linear(hidden, [matrix]), matrix.packed.nbytes


def main() -> None:
    native = radixrt_kernels.native
    if native is None:
        sys.exit(f"There is nothing to measure: {radixrt_kernels.missing_because}.")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isas", nargs="+", default=[native.isa()], choices=native.usable_isas())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--forms", nargs="+", default=[], help="beside bfloat16; default: all")
    arguments = parser.parse_args()
    use_threads(1)
    print(f"CPU time of one thread, medians of {arguments.rounds} rounds\n")
    print(
        "| shape | instruction set | form | MB | tokens | us | of bfloat16's | GB/s | products/ns |"
    )
    print("|---|---|---|--:|--:|--:|--:|--:|--:|")
    for rows, columns in BLOCK_SHAPES:
        _measure(rows, columns, arguments)


def _measure(rows: int, columns: int, arguments: argparse.Namespace) -> None:
    products = forms(rows, columns, arguments.forms)
    turns = {name: cycle(copies) for name, copies in products.items()}
    native = radixrt_kernels.native
    assert native is not None
    cases = list(product(arguments.isas, arguments.tokens, products))
    seconds: dict[tuple[str, int, str], list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for isa, tokens, name in cases:
            native.use_isa(isa)
            hidden = torch.randn(tokens, columns).to(DTYPE)
            seconds[isa, tokens, name].append(_turn(turns[name], hidden))
    for isa, tokens, name in cases:
        s, num_bytes = median(seconds[isa, tokens, name]), products[name][0][1]
        print(
            f"| {columns} -> {rows} | {isa} | {name} | {num_bytes / 1e6:.1f} | {tokens} | {s * 1e6:,.0f} "
            f"| {s / median(seconds[isa, tokens, 'bfloat16']):.2f} | {num_bytes / s / 1e9:.1f} "
            f"| {rows * columns * tokens / s / 1e9:.0f} |"
        )


def _turn(matrices: "cycle[tuple[Product, int]]", hidden: torch.Tensor) -> float:
    """CPU seconds of one product."""
    next(matrices)[0](hidden)
    repetitions, begin = 0, time.thread_time()
    while (used := time.thread_time() - begin) < SECONDS_A_TURN or repetitions < 2:
        next(matrices)[0](hidden)
        repetitions += 1
    return used / repetitions


if __name__ == "__main__":
    main()
