"""Makes a virtual environment with everything that radixrt needs: ``python3 deploy/set_up_venv.py .venv``.

The script selects the build of torch. With an NVIDIA GPU, a CUDA build that the machine's Python already has is
used; otherwise the default build (with CUDA) is installed. Without a GPU, a CPU build is installed, because the
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

OLDEST_PYTHON = (3, 11)


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
    pip_install(python, "--editable", f"{Path(__file__).parent.parent}[dev]")


def run(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    status = subprocess.run(command).returncode
    if status:
        sys.exit(f"set-up failed: the command above ended with status {status}")


def pip_install(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def base_python_has_cuda_torch() -> bool:
    check = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def install_torch(python: Path) -> None:
    if has_nvidia_gpu() or platform.system() != "Linux" or pip_would_install_cpu_build(python):
        pip_install(python, TORCH)
        return
    pip_install(python, "uv")  # knows the index of PyTorch's CPU builds
    run(
        str(python),
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        str(python),
        "--torch-backend",
        "cpu",
        TORCH,
    )


def pip_would_install_cpu_build(python: Path) -> bool:
    """Whether pip with its current configuration resolves torch to a build without CUDA, or has one installed."""
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
