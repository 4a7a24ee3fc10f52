"""Compiles the native kernels at installation. All other metadata of the package is in
pyproject.toml.

The environment variable ``RADIXRT_BUILD_KERNELS`` is ``auto``, ``require`` or ``off``. ``auto``
(default): if the kernels cannot be compiled, radixrt is installed without them and logs that when
it serves. ``require``: an installation without them fails. ``off``: nothing is compiled.

A build in a checkout (``build_ext --inplace``, ``pip install --editable``) also has the AMX kernels
with emulated tiles, which the tests run on every machine. A wheel does not.
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
    """Compiles ``radixrt_kernels/CMakeLists.txt``. Later builds in the same checkout compile only
    changed files."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.in_checkout = bool(self.inplace)  # setuptools resets it during the build

    def build_extension(self, ext: Extension) -> None:
        # A wheel is compiled by other tools, in an environment of its own: in one folder each would
        # start from scratch.
        name = f"kernels-{sys.implementation.cache_tag}" + ("" if self.in_checkout else "-wheel")
        build_dir = Path("build", name).absolute()
        compile_in(build_dir, stand_ins=self.in_checkout)
        (compiled,) = build_dir.glob("_native*.so")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(compiled), str(target))

    def copy_extensions_to_source(self) -> None:
        """Replace the old file by name, without changing its content: a running server has it
        mapped."""
        for old in SOURCE.glob("_native*.so"):
            old.unlink()
        super().copy_extensions_to_source()


def compile_in(build_dir: Path, stand_ins: bool) -> None:
    """Configure and compile; from scratch if the tools have changed.

    Raises:
        CompileError: a tool is missing, or the compilation failed.
    """
    tools = [sys.executable, *sys.path, os.environ.get("CXX", ""), shutil.which("ninja") or ""]
    stamp = build_dir / "built-with.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(tools):
        shutil.rmtree(build_dir, ignore_errors=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    python = f"-DPython_EXECUTABLE={sys.executable}"
    with_stand_ins = f"-DRADIXRT_STAND_INS={'ON' if stand_ins else 'OFF'}"
    try:
        run_cmake("-S", str(SOURCE), "-B", str(build_dir), python, with_stand_ins, *generator)
        stamp.write_text("\n".join(tools))
        run_cmake("--build", str(build_dir), "--parallel")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the native kernels cannot be compiled here: {error}") from error


def run_cmake(*arguments: str) -> None:
    subprocess.run(["cmake", *arguments], check=True)


kernels = Extension("radixrt_kernels._native", sources=[], optional=WANTED != "require")
setup(ext_modules=[] if WANTED == "off" else [kernels], cmdclass={"build_ext": CMakeBuild})
