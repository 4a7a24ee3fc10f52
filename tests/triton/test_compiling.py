"""Every Triton kernel compiles for Hopper, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

SHARED_BYTES = 227 << 10
"""What a program may have on an H100 or H200."""


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.triton.compile_for_hopper"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_and_fits_the_chip(compiled: list[dict]) -> None:
    from tests.triton.serving_shapes import LAUNCHES

    assert {kernel["launch"] for kernel in compiled} == set(LAUNCHES)
    for kernel in compiled:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        assert kernel["stack_bytes"] == 0, f"registers spill: {kernel}"
