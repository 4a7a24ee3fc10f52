"""Prints the instruction set and threads of the kernels, and checks each kernel: ``python -m
radixrt_kernels``."""

import sys

import radixrt_kernels


def main() -> int:
    native = radixrt_kernels.native
    if native is None:
        print(f"The native kernels are not used: {radixrt_kernels.missing_because}.")
        return 1
    from radixrt_kernels.self_check import CHECKS

    print(f"instruction set  {native.isa()} (usable here: {', '.join(native.usable_isas())})")
    print(f"threads          {native.num_threads()}")
    wrong = [isa for isa in native.usable_isas() if not native.same_products(isa, "baseline")]
    print(
        f"exact products   {'WRONG with ' + ', '.join(wrong) if wrong else 'the same with all of them'}"
    )
    failed = len(wrong)
    for family in CHECKS:
        for check in family():
            failed += not check.passed
            verdict = "ok" if check.passed else f"WRONG, at most {check.tolerance:.0e} is right"
            print(f"{check.name:<44} error {check.error:.1e}  {verdict}")
    if failed:
        print(
            f"{failed} kernels are wrong here; RADIXRT_KERNELS=off serves without them. Please report it."
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
