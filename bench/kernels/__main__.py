"""``python -m bench.kernels [--only TEXT] [--threads N]``: each kernel beside PyTorch and beside
the machine's limits."""

import argparse
import sys
from itertools import chain

import torch

import radixrt_kernels
from bench.kernels import attention, elementwise, linear, machine, recurrence
from bench.kernels.machine import best_seconds
from radixrt.worker.threads import use_threads

FAMILIES = (attention.cases, elementwise.cases, linear.cases, recurrence.cases)
SECONDS_A_CASE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--family", default="", help="cases of this file of bench/kernels alone")
    arguments = parser.parse_args()
    native = radixrt_kernels.native
    if native is None:
        sys.exit(f"There is nothing to measure: {radixrt_kernels.missing_because}.")
    use_threads(arguments.threads)
    limits = machine.measure()
    flops = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in limits.flops.items())
    print(
        f"{native.isa()}, {native.num_threads()} threads; reads {limits.bytes_per_second / 1e9:.1f} GB/s, {flops}\n"
    )
    print("| kernel | time, us | GB/s | GFLOP/s | of the bound | PyTorch takes |")
    print("|---|--:|--:|--:|--:|--:|")
    families = [f for f in FAMILIES if f.__module__.endswith(arguments.family)]
    for case in chain.from_iterable(family() for family in families):
        if arguments.only not in case.name:
            continue
        seconds, reference_s = _best(case.kernel), _best(case.reference)
        bound_s = limits.bound_s(case.num_bytes, case.operations, case.dtype)
        share = "" if case.in_cache else f"{bound_s / seconds:.0%}"
        print(
            f"| {case.name} | {seconds * 1e6:,.1f} | {case.num_bytes / seconds / 1e9:.1f} "
            f"| {case.operations / seconds / 1e9:.1f} | {share} | {reference_s / seconds:.1f} x |",
            flush=True,
        )


def _best(run) -> float:
    once = best_seconds(run, 1)
    return best_seconds(run, max(3, min(2000, int(SECONDS_A_CASE / once))))


if __name__ == "__main__":
    main()
