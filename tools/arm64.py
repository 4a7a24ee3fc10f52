"""Builds the kernels for ARM64 on another Linux machine, and checks each under QEMU's user
emulation: ``make test-arm64``.

    apt-get install g++-aarch64-linux-gnu qemu-user-static debian-archive-keyring
    python -m tools.arm64 [--folder build/arm64]

A Python of Debian for ARM64 and its libraries are unpacked into a folder, with packages of PyPI
beside them; nothing is installed on this machine. It shows that the kernels compile and compute
what their references do, not how fast they are.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from deploy.set_up_venv import run

ROOT = Path(__file__).parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SUITE = "bookworm"
"""Debian's release, whose Python is :data:`PYTHON`."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ["g++-aarch64-linux-gnu", "qemu-user-static", "debian-archive-keyring"]
MIRROR = "http://deb.debian.org/debian"
PYTHON = "3.11"
DEBIAN = [
    f"python{PYTHON}", f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib", "libc6", "libstdc++6", "libgcc-s1", "libgomp1", "zlib1g",
    "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5",
]  # fmt: skip
TORCH = "torch==2.9.1"
"""The last one whose wheel for ARM64 on PyPI has no CUDA."""
PYPI = [TORCH, "numpy", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "MarkupSafe", "fsspec", "filelock", "msgspec"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arm64", help="where the build and the unpacked packages lie (default: %(default)s)")  # fmt: skip
    folder = parser.parse_args().folder.absolute()
    for needed in (COMPILER, EMULATOR, "apt-get", "dpkg-deb", KEYRING):
        if shutil.which(needed) is None and not Path(needed).exists():
            sys.exit(f"{needed} is missing: apt-get install {' '.join(PACKAGES)}")
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        sys.exit(f"The kernels are built for Debian's Python {PYTHON}: run this with Python {PYTHON}.")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    unpack_debian(folder)
    unpack_pypi(folder / "site")
    kernels = build(folder / "cross")
    sys.exit(check(folder, kernels))


def unpack_debian(folder: Path) -> None:
    """Unpack Debian's packages into ``folder/system``, unless they are there."""
    if (system := folder / "system").exists():
        return
    lists = folder / "apt"
    for part in ("lists/partial", "archives/partial", "debs"):
        (lists / part).mkdir(parents=True, exist_ok=True)
    source = f"deb [arch=arm64 signed-by={KEYRING}] {MIRROR} {SUITE} main\n"
    (lists / "sources.list").write_text(source)
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::Etc::sourcelist": lists / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": lists / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": lists,
    }
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], cwd=lists / "debs", check=True)
    unfinished = folder / "system.part"
    for file in (lists / "debs").glob("*.deb"):
        run("dpkg-deb", "--extract", str(file), str(unfinished))
    unfinished.rename(system)


def unpack_pypi(site: Path) -> None:
    """Install PyPI's wheels for ARM64 into a folder, unless they are there."""
    if site.exists():
        return
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    platforms.append("--platform=manylinux2014_aarch64")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON]
    unfinished = site.with_suffix(".part")
    pip = [sys.executable, "-m", "pip", "install", *options, *platforms]
    run(*pip, "--target", str(unfinished), *PYPI)
    unfinished.rename(site)


def build(folder: Path) -> Path:
    """Compile the kernels; returns the shared object."""
    tools = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{tools}:{os.environ['PATH']}") or "cmake"
    ninja = shutil.which("ninja", path=f"{tools}:{os.environ['PATH']}")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    # The headers are this machine's Python's: they are the same for all 64-bit processors.
    run(
        *(cmake, "-S", str(ROOT / "radixrt_kernels"), "-B", str(folder), *generator, *target),
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
    )
    run(cmake, "--build", str(folder), "--parallel", str(os.cpu_count()))
    (built,) = folder.glob("_native*.so")
    return built


def check(folder: Path, kernels: Path) -> int:
    """Run the self check of the kernels under emulation; returns its exit status."""
    package = folder / "package" / "radixrt_kernels"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "radixrt_kernels", package, ignore=shutil.ignore_patterns("*.so", "csrc"))  # fmt: skip
    version = PYTHON.replace(".", "")
    shutil.copy(kernels, package / f"_native.cpython-{version}-aarch64-linux-gnu.so")
    system = folder / "system"
    python = system / "usr" / "bin" / f"python{PYTHON}"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(system / "usr"),
        "PYTHONPATH": f"{package.parent}:{folder / 'site'}",
        "QEMU_LD_PREFIX": str(system),
        "OMP_NUM_THREADS": "1",
    }
    # -B: the caches of compiled modules would be those of a Python that nobody has.
    command = [EMULATOR, str(python), "-B", "-m", "radixrt_kernels"]
    print("+", *command, flush=True)
    return subprocess.run(command, env=environment, cwd=folder).returncode


if __name__ == "__main__":
    main()
