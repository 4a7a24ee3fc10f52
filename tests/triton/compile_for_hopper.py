"""Compile every Triton kernel for sm_90 on a machine without a GPU, in the shapes that serving has.

    python -m tests.triton.compile_for_hopper [part of a name ...]

Prints a JSON line a kernel: its registers, its stack (where registers spill to) and its shared
memory. The functions that launch the kernels are called with tensors on the CPU under a driver that
compiles and launches nothing, so what is compiled is what a launch would compile, alignment and
all.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.triton.serving_shapes import LAUNCHES

HOPPER = GPUTarget("cuda", 90, 32)


class CompilingDriver:
    """Says that a Hopper GPU is there, which is all that a compilation asks."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return "void*" if name.startswith("*") else name


def compile_instead_of_launching(report: Callable[[Any], None]) -> None:
    """Every launch from here on compiles its kernel and reports it."""
    driver.set_active(CompilingDriver())
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *arguments: Any, **options: Any) -> None:
        report(run(kernel, *arguments, **{**options, "warmup": True}))

    JITFunction.run = compile_only


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of a kernel: REG a thread, STACK and LOCAL bytes (spills), SHARED
    bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


def describe(launch: str, compiled: Any) -> dict[str, Any]:
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "launch": launch,
        "kernel": compiled.metadata.name,
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "tensor_cores": sorted(
            set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"]))
        ),
    }


def main(wanted: list[str]) -> None:
    compiled: list[Any] = []
    compile_instead_of_launching(compiled.append)
    for name, launch in LAUNCHES.items():
        if wanted and not any(part in name for part in wanted):
            continue
        compiled.clear()
        launch()
        for kernel in compiled:
            print(json.dumps(describe(name, kernel)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
