"""``python -m bench.kernels.blocks [--rounds N] [--threads N]``: products with GGUF's packed blocks beside bfloat16, int8 and int4.

All forms take turns on the same shapes in each round, so that their ratios are of the same minutes of the machine.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median

import torch

import radixrt_kernels
from bench.kernels.linear import DTYPE, NOT_IN_CACHE
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.worker.threads import use_threads
from radixrt_kernels import blockwise, groupwise, linear
from radixrt_kernels.memory import Slabs

SHAPES = ((4096, 1024), (1024, 4096))
"""Rows and columns."""
TOKENS = (1, 8, 512)

Product = Callable[[torch.Tensor], torch.Tensor]


def forms(rows: int, columns: int) -> dict[str, list[tuple[Product, int]]]:
    """By name, products with matrices that are together larger than the cache, and their bytes of weights."""
    makers: dict[str, Callable[[], tuple[Product, int]]] = {
        "bfloat16": partial(_plain, rows, columns),
        "int8": partial(_groupwise, rows, columns, 8, columns),
        "int4": partial(_groupwise, rows, columns, 4, 128),
    }
    for number, kind in BLOCK_KINDS.items():
        row_bytes = columns // kind.columns * kind.num_bytes
        makers[kind.name] = partial(_blockwise, rows, columns, number, row_bytes, Slabs())
    made = {name: [make()] for name, make in makers.items()}
    for name, copies in made.items():
        copies += [makers[name]() for _ in range(max(2, NOT_IN_CACHE // copies[0][1]) - 1)]
    return made


def _plain(rows: int, columns: int) -> tuple[Product, int]:
    packed = linear.pack(torch.randn(rows, columns).to(DTYPE))
    return lambda hidden: linear.linear(hidden, packed, rows), packed.nbytes


def _groupwise(rows: int, columns: int, bits: int, group_size: int) -> tuple[Product, int]:
    groups = -(-columns // group_size)
    codes, zeros = (
        torch.randint(0, 1 << bits, (rows, count), dtype=torch.uint8) for count in (columns, groups)
    )
    m = groupwise.pack(codes, torch.rand(rows, groups).half(), zeros, bits, group_size)
    num_bytes = sum(part.nbytes for part in (m.codes, m.scales, m.zeros))
    return lambda hidden: groupwise.linear(hidden, m), num_bytes


def _blockwise(
    rows: int, columns: int, kind: int, row_bytes: int, memory: Slabs
) -> tuple[Product, int]:
    blocks = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8) & 0xBF  # finite scales
    if BLOCK_KINDS[kind].name == "MXFP4":  # subnormal products would take longer
        exponents = blocks[:, :: BLOCK_KINDS[kind].num_bytes]
        exponents.copy_(120 + exponents % 8)
    matrix = blockwise.pack(blocks, kind, rows, columns, memory)
    return lambda hidden: blockwise.linear(hidden, [matrix]), matrix.packed.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    native = radixrt_kernels.native
    if native is None:
        sys.exit(f"There is nothing to measure: {radixrt_kernels.missing_because}.")
    use_threads(arguments.threads)
    print(f"{native.isa()}, {native.num_threads()} threads, medians of {arguments.rounds} rounds\n")
    print(
        "| shape | form | MB | "
        + " | ".join(f"{t} tokens, us (of bfloat16's, int4's)" for t in TOKENS)
        + " |"
    )
    print("|---|---|--:|" + "--:|" * len(TOKENS))
    for rows, columns in SHAPES:
        _measure(rows, columns, arguments.rounds)


def _measure(rows: int, columns: int, rounds: int) -> None:
    products = forms(rows, columns)
    turns = {name: cycle(copies) for name, copies in products.items()}
    seconds: dict[tuple[str, int], list[float]] = {(n, t): [] for n in products for t in TOKENS}
    for _ in range(rounds):
        for tokens in TOKENS:
            hidden = torch.randn(tokens, columns).to(DTYPE)
            repetitions = max(1, 40 // tokens)
            for name, turn in turns.items():
                next(turn)[0](hidden)
                begin = time.perf_counter()
                for _ in range(repetitions):
                    next(turn)[0](hidden)
                seconds[name, tokens].append((time.perf_counter() - begin) / repetitions)
    times = {key: median(values) for key, values in seconds.items()}
    for name, copies in products.items():
        cells = [
            f"{times[name, t] * 1e6:,.0f} ({times[name, t] / times['bfloat16', t]:.2f}, "
            f"{times[name, t] / times['int4', t]:.2f})"
            for t in TOKENS
        ]
        print(f"| {columns} -> {rows} | {name} | {copies[0][1] / 1e6:.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
