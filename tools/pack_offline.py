"""Packs what a GPU machine without a network lacks: ``python -m tools.pack_offline OUT``.

    python -m tools.pack_offline OUT [--python 3.12] [--kernels BUILT] [--have torch triton ...]

Downloads the wheels of radixrt's own dependencies (and theirs), in the versions installed here, for
another Python and x86-64 Linux, unpacks them, adds kernels that ``tools.flashinfer_kernels build``
has made, and writes one archive and a script. There::

    . OUT/use.sh && make gpu-check PYTHON=python3

``--have`` names what the machine has already, so that it isn't carried: torch and what comes with
it, by default. FlashInfer comes without its own dependencies: what radixrt calls needs none of them
but those listed here.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("server", "cuda", "test")
FLASHINFER = "flashinfer-python"
FLASHINFER_NEEDS = ("apache-tvm-ffi", "nvidia-ml-py", "requests", "tqdm", "packaging", "filelock")
"""Packages beside what radixrt itself brings, found by calling what it calls."""

HAVE = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub",
    "pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "httpx", "psutil", "rich", "jinja2",
)  # fmt: skip
"""What machines for GPU work usually have."""

NEVER = ("nvidia-*", "torch", "triton", "openai")
"""Not carried even where something asks for it: gigabytes, or a test's whim."""

DROPPED = (
    "flashinfer/data/csrc/fused_moe/*", "flashinfer/data/csrc/fmha_v2/*", "flashinfer/data/csrc/generated/*",
    "flashinfer/data/csrc/experimental/*", "flashinfer/data/csrc/blackwell_*", "flashinfer/data/csrc/cake_*",
    "flashinfer/data/csrc/*sm100*", "flashinfer/data/csrc/*sm103*", "flashinfer/data/csrc/*sm120*",
    "flashinfer/data/csrc/*sm12x*", "flashinfer/data/csrc/alphamoe*", "flashinfer/data/csrc/kda/*",
    "flashinfer/data/csrc/gdn*", "flashinfer/experimental/*.cu", "flashinfer/experimental/*.cuh", "flashinfer/moe_ep/*",
    "flashinfer/data/cutlass/examples/*", "flashinfer/data/cutlass/test/*", "flashinfer/data/cutlass/docs/*",
    "flashinfer/data/cutlass/media/*", "flashinfer/data/cutlass/python/*", "flashinfer/data/cccl/python/*",
)  # fmt: skip
"""Sources that serving on Hopper never compiles: other models' kernels, and Blackwell's."""

MAX_MIB = 48
"""A larger archive is too large for machines to which little can be carried."""

USE = """# . {name}/use.sh    unpacks once, then sets this shell up
_pack=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
_site=${{RADIXRT_SITE:-${{TMPDIR:-/tmp}}/radixrt-site-{stamp}}}
if [ ! -e "$_site/.complete" ]; then
    mkdir -p "$_site"
    # tar needs the program xz; Python has the library.
    {{ tar -xJf "$_pack/site-{stamp}.tar.xz" -C "$_site" 2>/dev/null ||
        python3 -W ignore -m tarfile -e "$_pack/site-{stamp}.tar.xz" "$_site"; }} && touch "$_site/.complete"
fi
export PYTHONPATH="$_site${{PYTHONPATH:+:$PYTHONPATH}}"
export FLASHINFER_USE_CUDA_NORM=1      # the compiled norms, also where a CuTe DSL is installed
export FLASHINFER_DISABLE_JIT=${{FLASHINFER_DISABLE_JIT-1}}   # empty: compile there what was not carried
"""


def packages(have: tuple[str, ...]) -> dict[str, str]:
    """Name and version of each package to carry: what radixrt needs to serve and to be tested, and
    what that needs in turn, in the versions installed here, which are the tested ones; without what
    the machine has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *FLASHINFER_NEEDS]
    for extra in EXTRAS:
        waiting += project["optional-dependencies"].get(extra, [])
    found: dict[str, str] = {}
    while waiting:
        name = _name_of(waiting.pop())
        if name in found or (_among(name, (*have, *NEVER)) and name not in FLASHINFER_NEEDS):
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(
                f"{name} is not installed here; run `make install` first, or name it in --have."
            )
        found[name] = distribution.version
        if name != FLASHINFER:
            waiting += [text for text in distribution.requires or () if _applies(text)]
    return found


def _applies(requirement: str) -> bool:
    """Whether a package's requirement holds on the machine; what extras ask for does not."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": "", "sys_platform": "linux"})


def _name_of(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _among(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def download(folder: Path, python: str, wanted: dict[str, str]) -> list[Path]:
    """The wheels of these packages, and of no others."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35):
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for old in ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"):
        command += ["--platform", old]
    subprocess.run(
        [*command, *(f"{name}=={version}" for name, version in wanted.items())], check=True
    )
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, site: Path) -> None:
    """A wheel's modules into an importable folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if name.endswith("/") or any(fnmatch.fnmatch(name, pattern) for pattern in DROPPED):
                continue
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def add_kernels(built: Path, site: Path) -> int:
    """Compiled kernels to where FlashInfer looks first; returns how many."""
    from tools.flashinfer_kernels import modules_of

    modules = list(modules_of(built))
    for module in modules:
        target = site / "flashinfer/data/aot" / module
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built / module, target)
    return len(modules)


def write_archive(site: Path, out: Path, level: int) -> str:
    """``out/site-<stamp>.tar.xz``, the same bytes for the same content; returns the stamp."""
    files = sorted(
        (file for file in site.rglob("*") if file.is_file()), key=lambda f: (f.suffix, str(f))
    )  # like beside like, which compresses better
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(site)).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    stamp = digest.hexdigest()[:10]
    for old in out.glob("site-*.tar.xz"):
        old.unlink()
    with tarfile.open(out / f"site-{stamp}.tar.xz", "w:xz", preset=level) as archive:
        for file in files:
            entry = archive.gettarinfo(file, str(file.relative_to(site)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with file.open("rb") as content:
                archive.addfile(entry, content)
    return stamp


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.pack_offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine (default: %(default)s)")
    parser.add_argument("--kernels", type=Path, help="what tools.flashinfer_kernels build has made")
    parser.add_argument("--have", nargs="*", default=HAVE, help="default: torch and its like")
    parser.add_argument("--level", type=int, default=2, choices=range(10), help="of compression")
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        wheels.mkdir()
        carried = download(wheels, parsed.python, packages(tuple(parsed.have)))
        for wheel in carried:
            unpack(wheel, site)
        kernels = add_kernels(parsed.kernels, site) if parsed.kernels else 0
        stamp = write_archive(site, parsed.out, parsed.level)
    (parsed.out / "use.sh").write_text(USE.format(name=parsed.out.name, stamp=stamp))
    size = (parsed.out / f"site-{stamp}.tar.xz").stat().st_size / 2**20
    content = {"python": parsed.python, "wheels": [w.name for w in carried], "kernels": kernels}
    (parsed.out / "content.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{parsed.out}: {len(carried)} packages and {kernels} kernels in {size:.1f} MiB")
    if size > MAX_MIB:
        sys.exit(f"More than {MAX_MIB} MiB: try --level 9, or leave packages out with --have.")


if __name__ == "__main__":
    main(sys.argv[1:])
