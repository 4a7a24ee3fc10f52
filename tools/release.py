"""Checks what a release uploads: ``make release-check``.

    python -m tools.release sdist [--out dist]
    python -m tools.release check [--out dist] [--tag v0.1.0] [--complete]

``check`` looks at every file of the folder: its metadata (by twine, if it is installed), its tags,
and its content against the checkout. ``--tag`` holds the version against the tag and the changelog,
``--complete`` asks for a wheel of each Python and processor, and for the source distribution.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from tools.wheel import ROOT, SOURCES, content_problems, tracked_files

PYTHONS = ("cp311", "cp312", "cp313", "cp314")
PROCESSORS = ("x86_64", "aarch64")
WHEEL = re.compile(r"radixrt-(?P<version>[^-]+)-(?P<python>cp\d+)-cp\d+-(?P<platform>.+)\.whl")
NEEDED_OF_SDIST = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "PKG-INFO")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    sdist_parser = commands.add_parser("sdist")
    sdist_parser.set_defaults(call=lambda args: print(sdist(args.out)))
    check_parser = commands.add_parser("check")
    check_parser.add_argument("--tag", help="the tag of the release")
    check_parser.add_argument("--complete", action="store_true", help="nothing may be missing")
    check_parser.set_defaults(call=check)
    for each in (sdist_parser, check_parser):
        each.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    args.call(args)


def sdist(out: Path) -> Path:
    """Build the source distribution; ends the program if that fails."""
    make = "from setuptools.build_meta import build_sdist; import sys; print(build_sdist(sys.argv[1]))"  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-c", make, out.absolute()], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        sys.exit(f"There is no source distribution:\n{done.stdout}{done.stderr}")
    return out / done.stdout.splitlines()[-1]


def check(args: argparse.Namespace) -> None:
    """Print the digests of the files; ends the program with all problems."""
    files = sorted([*args.out.glob("*.whl"), *args.out.glob("*.tar.gz")])
    problems = [] if files else [f"{args.out} has no files of a release"]
    problems += tag_problems(args.tag) if args.tag else []
    problems += missing_files(files) if args.complete else []
    for file in files:
        found = wheel_problems(file) if file.suffix == ".whl" else sdist_problems(file)
        problems += [f"{file.name}: {problem}" for problem in found]
    problems += metadata_problems(files)
    if problems:
        sys.exit("\n".join(problems))
    for file in files:
        print(hashlib.sha256(file.read_bytes()).hexdigest(), "", file.name)


def declared_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def tag_problems(tag: str) -> list[str]:
    """Differences between a tag, the version and the changelog."""
    version = declared_version()
    problems = [] if tag == f"v{version}" else [f"the tag is {tag}, and the version {version}: set it in pyproject.toml"]  # fmt: skip
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        problems.append(f"CHANGELOG.md has no section [{version}]")
    return problems


def missing_files(files: list[Path]) -> list[str]:
    """Wheels and the source distribution that a release lacks."""
    found = {
        (match["python"], processor)
        for file in files
        if (match := WHEEL.fullmatch(file.name))
        for processor in PROCESSORS
        if match["platform"].endswith(processor)
    }
    wanted = {(python, processor) for python in PYTHONS for processor in PROCESSORS}
    problems = [f"there is no wheel for {' and '.join(pair)}" for pair in sorted(wanted - found)]
    if not any(file.name.endswith(".tar.gz") for file in files):
        problems.append("there is no source distribution")
    return problems


def wheel_problems(file: Path) -> list[str]:
    """What is wrong with a wheel's name and content."""
    match = WHEEL.fullmatch(file.name)
    if match is None:
        return ["this is not the name of a wheel of radixrt with kernels"]
    problems = [] if match["version"] == declared_version() else ["it has another version"]
    if "manylinux" not in match["platform"]:
        problems.append("it has no manylinux tag: no index takes it. Install auditwheel and patchelf, and build it again")  # fmt: skip
    return problems + content_problems(zipfile.ZipFile(file).namelist(), tracked_files())


def sdist_problems(file: Path) -> list[str]:
    """Files that a source distribution lacks: those of the checkout's packages, and those that
    build them."""
    with tarfile.open(file) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {*tracked_files(), *NEEDED_OF_SDIST}
    assert any(SOURCES.match(name) for name in wanted)
    return [f"lacks {name}" for name in sorted(wanted - packed)]


def metadata_problems(files: list[Path]) -> list[str]:
    """What ``twine check --strict`` says."""
    twine = shutil.which("twine", path=f"{Path(sys.executable).parent}:/usr/bin") or shutil.which("twine")  # fmt: skip
    if twine is None:
        print("twine is not installed: the metadata is not checked.", file=sys.stderr)
        return []
    if not files:
        return []
    done = subprocess.run([twine, "check", "--strict", *files], capture_output=True, text=True)
    return [done.stdout + done.stderr] if done.returncode else []


if __name__ == "__main__":
    main()
