"""Tests and measures radixrt on this GPU within eight minutes: ``make gpu-check``.

    python -m tools.gpu_check [--out DIR] [--minutes 8] [--skip tests|bench] [--bench-only 1 3]

Everything that is written into DIR is also packed into DIR.tar.gz.

Uses the Python that runs it and installs nothing, so it works on a machine without a network. Each
step has a time of its own and writes its results as they come: a run that is cut short leaves what
it has found.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench import children

ROOT = Path(__file__).parent.parent
TESTS_SHARE = 0.42
"""Share of the time; the rest is for measurements."""

FLASHINFER_SETTINGS = {
    "FLASHINFER_DISABLE_JIT": "1",  # a kernel that was not compiled ahead is told at once, not after minutes
    "FLASHINFER_USE_CUDA_NORM": "1",  # the compiled norms, also where a CuTe DSL is installed
}
STOP_S = 10.0
"""What a step that ran out of time has to say what it has found."""

ALONE = ("tests/gpu/test_worker.py", "tests/gpu/test_server.py")
"""They want shares of the GPU's memory, so nothing else may run."""

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "llguidance")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: %(default)s)")  # fmt: skip
    parser.add_argument("--skip", choices=["tests", "bench"], help="run the other one alone")
    parser.add_argument("--bench-only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="test processes at a time")  # fmt: skip
    parser.add_argument("--jit", action="store_true", help="let FlashInfer compile what it lacks")
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * parsed.minutes - 5
    environment = _environment(parsed.jit)
    machine = _machine()
    (parsed.out / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    print(json.dumps(machine, indent=2), flush=True)
    if machine["gpu"] is None:
        print(
            "torch finds no CUDA device here; `python -m bench.gpu --dry-run` runs the measurements on a CPU."
        )
        return 1
    status = 0
    if parsed.skip != "tests":
        share = 1.0 if parsed.skip == "bench" else TESTS_SHARE
        end = time.monotonic() + share * (deadline - time.monotonic())
        for command in _pytest(parsed.out, parsed.workers):
            status |= _run(command, environment, end - time.monotonic())
        _pack(parsed.out)
    if parsed.skip != "bench":
        left = deadline - time.monotonic()
        bench = [sys.executable, "-m", "bench.gpu", "--out", str(parsed.out / "bench")]
        bench += ["--budget", f"{left - 10:.0f}"]
        bench += ["--only", *parsed.bench_only] if parsed.bench_only else []
        status |= _run(bench, environment, left)
        (parsed.out / "bench.tar.gz").unlink(missing_ok=True)  # all of it is in bench/
        _pack(parsed.out)
    return status


def _pack(out: Path) -> None:
    print(f"All of it in one file: {shutil.make_archive(str(out), 'gztar', out)}", flush=True)


def _pytest(out: Path, workers: int) -> list[list[str]]:
    """The GPU's tests, and Triton's, which a GPU compiles and runs instead of interpreting them."""
    options = ["-p", "no:cacheprovider", "-q", "-rfEs", "--timeout", "120"]
    pytest = [sys.executable, "-m", "pytest", *options]
    together = [*pytest, "tests/gpu", "tests/triton"]
    together += ["--junitxml", str((out / "tests.xml").resolve())]
    for file in ("tests/triton/test_compiling.py", *ALONE):
        together += ["--ignore", file]
    if importlib.util.find_spec("xdist") is not None:
        together += ["-n", str(workers), "--dist", "worksteal"]
    alone = [*pytest, *ALONE, "--junitxml", str((out / "tests-alone.xml").resolve())]
    return [alone, together]


def _run(command: list[str], environment: dict[str, str], limit_s: float) -> int:
    """Returns the exit status; 1 where the time was over."""
    print("+", " ".join(command), f"(at most {limit_s:.0f} s)", flush=True)
    process = children.start(command, cwd=ROOT, env=environment)
    try:
        return int(process.wait(max(1.0, limit_s)) != 0)
    except subprocess.TimeoutExpired:
        print(f"Stopped after {limit_s:.0f} s.", flush=True)
        # Like Ctrl-C: pytest still says what has failed, and the bench ends the session that holds
        # the GPU.
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        return 1
    finally:
        children.end(process, timeout_s=0)


def _environment(jit: bool) -> dict[str, str]:
    settings = {**FLASHINFER_SETTINGS, **os.environ}
    if jit:  # whatever the shell was set up for
        settings["FLASHINFER_DISABLE_JIT"] = ""
    # radixrt need not be installed: every process finds it here.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**settings, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _machine() -> dict[str, object]:
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit(f"{sys.executable} has no torch; name one that has: make gpu-check PYTHON=…")

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "gpu memory, GiB": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if gpu else None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "flashinfer kernels compiled ahead": _compiled_ahead(),
    }


def _compiled_ahead() -> list[str]:
    specification = importlib.util.find_spec("flashinfer")
    if specification is None or specification.origin is None:
        return []
    folder = Path(specification.origin).parent / "data/aot"
    return sorted(path.name for path in folder.glob("*") if path.is_dir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
