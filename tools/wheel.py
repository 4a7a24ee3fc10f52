"""Builds a wheel and tests it in an empty environment: ``make wheel``, ``make test-wheel``.

    python -m tools.wheel build [--out dist]
    python -m tools.wheel test [WHEEL]

``build`` needs a compiler; ``auditwheel`` (with ``patchelf``), if it is installed, gives the wheel
its manylinux tag. ``test`` compares the content with the checkout, installs the wheel into a new
environment of the Python that runs it, and does outside the checkout, with an empty home folder,
what the README's first minute does.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

from bench import children
from bench.local_server import comes_alive, free_port
from deploy.set_up_venv import install_torch, pip_install, run

ROOT = Path(__file__).parent.parent
SOURCES = re.compile(r"radixrt_kernels/(csrc/|CMakeLists\.txt)")
"""Tracked files of the packages that only a build needs."""
KERNELS = re.compile(r"radixrt_kernels/_native\.[^/]+\.so")
BESIDE = re.compile(r"radixrt-[^/]+\.dist-info/|radixrt\.libs/")
"""Metadata, and libraries that auditwheel adds."""

QUESTION = "The owner of Bramol is Teska. The owner of Vidur is Noval. What is the owner of Vidur?"
ANSWER = "The owner of Vidur is Noval."
LINES_TYPED = 3
"""torch, the wheel and ``radixrt run``, as the README has them."""
START_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    build_parser = commands.add_parser("build")
    build_parser.add_argument("--out", type=Path, default=ROOT / "dist")
    build_parser.set_defaults(call=lambda args: print(build(args.out)))
    test_parser = commands.add_parser("test")
    test_parser.add_argument("wheel", type=Path, nargs="?", help="default: a wheel is built")
    test_parser.set_defaults(call=lambda args: test(args.wheel))
    args = parser.parse_args()
    args.call(args)


def build(out: Path) -> Path:
    """Build the wheel of the checkout into the folder ``out``; ends the program if that fails."""
    for left in (ROOT / "build").glob("lib*"):  # setuptools would pack modules that are gone
        shutil.rmtree(left)
    os.environ["RADIXRT_BUILD_KERNELS"] = "require"
    with tempfile.TemporaryDirectory() as temp:
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
        run(*pip, "--no-build-isolation", "--wheel-dir", temp, str(ROOT))
        (wheel,) = Path(temp).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        tool = shutil.which(
            "auditwheel", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )
        if tool is None:
            print("auditwheel is not installed: the wheel fits this system and similar ones.")
            return Path(shutil.copy(wheel, out))
        repaired = Path(temp, "repaired")
        run(tool, "repair", "--wheel-dir", str(repaired), str(wheel))
        return Path(shutil.copy(next(repaired.glob("*.whl")), out))


def test(wheel: Path | None) -> None:
    """Test a wheel; ends the program at the first failure."""
    os.environ.pop("PYTHONPATH", None)  # else pip finds a checkout there, and installs nothing
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        wheel = (wheel or build(folder / "dist")).absolute()
        if problems := content_problems(zipfile.ZipFile(wheel).namelist(), tracked_files()):
            sys.exit(f"{wheel.name}: " + "; ".join(problems))
        print(f"{wheel.name} has the files of the checkout and the kernels.", flush=True)
        begin = time.monotonic()
        run(sys.executable, "-m", "venv", str(folder / "venv"))
        python = folder / "venv" / "bin" / "python"
        install_torch(python)
        pip_install(python, f"radixrt[server] @ {wheel.as_uri()}")
        installed_s = time.monotonic() - begin
        first_minute(python, folder / "home", installed_s)
        with_uvx(wheel)
    print("The wheel works.")


def tracked_files() -> list[str]:
    """The files of the packages that git knows."""
    command = ["git", "ls-files", "radixrt", "radixrt_kernels"]
    return subprocess.check_output(command, cwd=ROOT, text=True).split()


def content_problems(files: list[str], tracked: list[str]) -> list[str]:
    """Differences between a wheel's files and the tracked files of its packages."""
    packed = {name for name in files if not BESIDE.match(name) and not name.endswith("/")}
    kernels = {name for name in packed if KERNELS.fullmatch(name)}
    expected = {name for name in tracked if not SOURCES.match(name)}
    problems = [] if kernels else ["no kernels"]
    problems += [f"lacks {name}" for name in sorted(expected - packed)]
    return problems + [f"has {name}" for name in sorted(packed - expected - kernels)]


def first_minute(python: Path, home: Path, installed_s: float) -> None:
    """Run the installed commands as a newcomer would; ends at the first failure.

    The folder ``home`` is empty, so there is no cache, and no program but those of the environment
    is in ``PATH``, so there is no compiler.

    Args:
        installed_s: seconds that the installation took, for the report.
    """
    home.mkdir()
    unwanted = ("PYTHON", "XDG_", "HF_", "RADIXRT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment = {**kept, "HOME": str(home), "PATH": str(python.parent)}
    radixrt = str(python.with_name("radixrt"))

    def output_of(*command: str) -> str:
        print("+", *command, flush=True)
        done = children.run(
            command, capture_output=True, text=True, cwd=home, env=environment, timeout=COMMAND_TIMEOUT_S
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"It ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return str(done.stdout)

    begin = time.monotonic()
    if ANSWER not in (answer := output_of(radixrt, "run", "demo", "-p", QUESTION)):
        sys.exit(f"radixrt run: expected {ANSWER!r}, got {answer!r}")
    first_s = time.monotonic() - begin
    print(
        f"From the wheel to the first answer: {installed_s:.1f} s of installation, then {first_s:.1f} s; "
        f"{LINES_TYPED} lines typed. Compilers in PATH: {shutil.which('c++', path=environment['PATH'])}.",
        flush=True,
    )
    output_of(str(python), "-m", "radixrt_kernels")
    print(output_of(radixrt, "doctor"))
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    serve = [radixrt, "serve", "--port", port]
    with children.running(serve, cwd=home, env=environment) as server:
        if not comes_alive(f"{url}/ready", server, START_TIMEOUT_S):
            sys.exit("The server did not start.")
        body = {"messages": [{"role": "user", "content": QUESTION}]}
        if ANSWER not in (answer := fetch(f"{url}/v1/chat/completions", body)):
            sys.exit(f"The server: expected {ANSWER!r}, got {answer}")
        page = fetch(f"{url}/")
        if not (parts := re.findall(r'(?:src|href)="(/page/[^"]+)"', page)):
            sys.exit(f"The server: this is not its web page: {page[:200]!r}")
        for part in parts:
            fetch(url + part)
        bench = (radixrt, "bench", "serve", "--base-url", f"{url}/v1", "--num-prompts", "4")
        print(output_of(*bench))


def with_uvx(wheel: Path) -> None:
    """Ask the wheel a question by uvx, in one line, if uv is installed; ends the program if the
    answer is wrong."""
    if (uvx := shutil.which("uvx")) is None:
        print("uv is not installed: the line with uvx is not tried.")
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    source = f"radixrt[server] @ {wheel.as_uri()}"
    command = [uvx, "--python", version, "--from", source, "radixrt", "run", "demo", "-p", QUESTION]
    begin = time.monotonic()
    environment = os.environ | {"UV_TORCH_BACKEND": "cpu"}
    done = children.run(command, capture_output=True, text=True, env=environment, timeout=COMMAND_TIMEOUT_S)  # fmt: skip
    if ANSWER not in str(done.stdout):
        sys.exit(f"uvx: expected {ANSWER!r}, got {done.stdout}{done.stderr}")
    print(f"The first answer by uvx, in one line, after {time.monotonic() - begin:.1f} s.")


def fetch(url: str, body: object = None) -> str:
    """The answer of a server; ``body`` makes it a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Accept": "text/html", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
