"""How are the native kernels compiled when radixrt is installed? Everything else about the package is in pyproject.toml.

Where they cannot be compiled, radixrt is installed without them, and says so when it serves. ``RADIXRT_BUILD_KERNELS``
is ``auto`` (that), ``require`` (an installation without them fails) or ``off`` (nothing is compiled).

A checkout's own build (``build_ext --inplace``, ``pip install --editable``) also gets the kernels for AMX with its tiles emulated,
which the tests run everywhere; a wheel doesn't.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

WANTED = os.environ.get("RADIXRT_BUILD_KERNELS", "auto")
SOURCE = Path(__file__).parent / "radixrt_kernels"


class CMakeBuild(build_ext):
    """Compiles ``radixrt_kernels/CMakeLists.txt``; later builds in one checkout compile only what has changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.in_checkout = bool(self.inplace)  # setuptools forgets it while it builds

    def build_extension(self, ext: Extension) -> None:
        build_dir = Path("build", f"kernels-{sys.implementation.cache_tag}").absolute()
        compile_in(build_dir, emulate_amx=self.in_checkout)
        (compiled,) = build_dir.glob("_native*.so")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(compiled), str(target))

    def copy_extensions_to_source(self) -> None:
        """A running server has the old file mapped: leave its content alone, and give its name to the new one."""
        for old in SOURCE.glob("_native*.so"):
            old.unlink()
        super().copy_extensions_to_source()


def compile_in(build_dir: Path, emulate_amx: bool) -> None:
    """Configure and compile, from scratch where the tools are others than last time.

    Raises:
        CompileError: this machine lacks a tool, or the compiler refused.
    """
    tools = [sys.executable, *sys.path, os.environ.get("CXX", ""), shutil.which("ninja") or ""]
    stamp = build_dir / "built-with.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(tools):
        shutil.rmtree(build_dir, ignore_errors=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    python = f"-DPython_EXECUTABLE={sys.executable}"
    emulation = f"-DRADIXRT_EMULATE_AMX={'ON' if emulate_amx else 'OFF'}"
    try:
        run_cmake("-S", str(SOURCE), "-B", str(build_dir), python, emulation, *generator)
        stamp.write_text("\n".join(tools))
        run_cmake("--build", str(build_dir), "--parallel")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the native kernels cannot be compiled here: {error}") from error


def run_cmake(*arguments: str) -> None:
    subprocess.run(["cmake", *arguments], check=True)


kernels = Extension("radixrt_kernels._native", sources=[], optional=WANTED != "require")
setup(ext_modules=[] if WANTED == "off" else [kernels], cmdclass={"build_ext": CMakeBuild})
