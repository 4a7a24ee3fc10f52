"""Makes a virtual environment with everything that radixrt needs: ``python3 deploy/set_up_venv.py
.venv``.

The script selects the build of torch. With an NVIDIA GPU, a CUDA build that the machine's Python
already has is used; otherwise the default build (with CUDA) is installed. FlashInfer and Triton
(the extra ``cuda``) are installed, too. Without a GPU, a CPU build is installed, because the
default build for Linux has gigabytes of CUDA libraries.
"""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
"""The version that the tests use; radixrt accepts any version in pyproject.toml's range."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU builds, which uv knows by name."""

OLDEST_PYTHON = (3, 11)

NO_CPU_BUILD = """
set-up failed: {torch} without CUDA could not be installed. It comes from
{index}, which cannot be reached, or has no such build for this Python and
processor; the error is above. How to go on, with one of these:
  - Behind a proxy: set HTTPS_PROXY.
  - A mirror of that index:    PIP_EXTRA_INDEX_URL=https://MIRROR/whl/cpu
  - A folder with its wheels:  PIP_FIND_LINKS=/path/to/folder
  - Install a torch (2.6 or newer) yourself; set-up keeps it:
      {python} -m pip install /path/to/torch.whl
    The default build works too; it downloads gigabytes of CUDA libraries:
      {python} -m pip install {torch}
Then run the same command again."""

NO_PACKAGES = """
set-up failed: the packages above could not be installed; the error is above. If PyPI cannot be reached: set HTTPS_PROXY, or
PIP_INDEX_URL to a mirror. Then run the same command again."""


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(
            f"radixrt needs Python {wanted} or newer, this is {platform.python_version()}: make PYTHON=python3.x"
        )
    venv = Path(sys.argv[1])
    python = venv / "bin" / "python"
    keep_torch = has_nvidia_gpu() and base_python_has_cuda_torch()
    options = ["--system-site-packages"] if keep_torch else []
    run(sys.executable, "-m", "venv", *options, str(venv))
    print("What is missing is downloaded now; that can take some minutes.", flush=True)
    if not keep_torch:
        install_torch(python)
    install_radixrt(python)


def run(*command: str) -> None:
    """Run a command; ends the program if it fails."""
    if status := status_of(*command):
        sys.exit(f"set-up failed: the command above ended with status {status}")


def status_of(*command: str) -> int:
    print("+", " ".join(command), flush=True)
    return subprocess.run(command).returncode


def pip(python: Path, *arguments: str) -> int:
    """Install with pip; returns its exit status."""
    options = ("--quiet", "--disable-pip-version-check")
    return status_of(str(python), "-m", "pip", "install", *options, *arguments)


def pip_install(python: Path, *arguments: str) -> None:
    """Install with pip; ends the program with advice if that fails."""
    if pip(python, *arguments):
        sys.exit(NO_PACKAGES)


def install_radixrt(python: Path) -> None:
    """Install this checkout with all that it needs here. The installed torch stays."""
    extras = "dev,cuda" if has_nvidia_gpu() else "dev"
    pip_install(python, "--editable", f"{Path(__file__).parent.parent}[{extras}]")


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def base_python_has_cuda_torch() -> bool:
    check = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def install_torch(python: Path) -> None:
    """Install :data:`TORCH`, without CUDA where no GPU is. If that fails, an installed torch stays,
    or the program ends with advice."""
    if has_nvidia_gpu() or platform.system() != "Linux" or pip_would_install_cpu_build(python):
        pip_install(python, TORCH)
        return
    backend = ("--quiet", "--python", str(python), "--torch-backend", "cpu")
    if pip(python, "uv") or status_of(str(python), "-m", "uv", "pip", "install", *backend, TORCH):
        version = "import torch; print(torch.__version__)"
        installed = subprocess.run([str(python), "-c", version], capture_output=True, text=True)
        if installed.returncode:
            sys.exit(NO_CPU_BUILD.format(torch=TORCH, index=CPU_INDEX, python=python))
        print(f"{TORCH} could not be installed; torch {installed.stdout.strip()} stays.")


def pip_would_install_cpu_build(python: Path) -> bool:
    """Whether pip with its current configuration resolves torch to a build without CUDA, or has one
    installed."""
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--report",
        "-",
        TORCH,
    ]
    report = subprocess.run(command, capture_output=True, text=True)
    if report.returncode:
        return False
    would_install = json.loads(report.stdout)["install"]
    return all(torch["metadata"]["version"].endswith("+cpu") for torch in would_install)


if __name__ == "__main__":
    main()
