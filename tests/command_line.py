"""Commands of ``radixrt`` and programs in the tests' own process, which has imported what they need:
a process of its own takes a second for that."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from radixrt.cli.main import main


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What a command does whose input and output are pipes, as ``subprocess.run`` says it."""
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        main(arguments)
    said = [stream.buffer.getvalue().decode() for stream in (out, error)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *said)


def run_program(file: Path, *arguments: str) -> str:
    """What a Python program prints."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
    ):
        patch.setattr(sys, "argv", [file.name, *arguments])
        patch.syspath_prepend(file.parent)
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()
