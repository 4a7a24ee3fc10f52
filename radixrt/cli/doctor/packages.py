"""Checks Python and the installed packages against the requirements of radixrt."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from radixrt import __version__
from radixrt.cli.doctor.machine import Finding


def python() -> Iterator[Finding]:
    """Versions of radixrt and Python, and the system."""
    place = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's environment"
    yield Finding(
        subject="versions",
        level="ok",
        fact=f"radixrt {__version__}, Python {platform.python_version()} in {place}, {platform.platform(terse=True)}, {platform.machine()}",
    )


def packages(extra: str = "server") -> Iterator[Finding]:
    """The requirements of ``radixrt[extra]``."""
    try:
        requirements = importlib.metadata.requires("radixrt") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            subject="packages",
            level="warning",
            fact="radixrt runs from a folder and is not installed, so its requirements are unknown.",
            advice="Run `pip install -e '.[server]'` in the checkout.",
        )
        return
    wrong = [
        text
        for text in map(Requirement, requirements)
        if _is_meant(text, extra) and not _is_met(text)
    ]
    for requirement in wrong:
        yield Finding(
            subject="packages",
            level="error",
            fact=f"{requirement.name}{requirement.specifier} is needed, and {_state(requirement.name)}.",
            advice=f"Run `pip install '{requirement.name}{requirement.specifier}'`.",
        )
    if not wrong:
        yield Finding(
            subject="packages", level="ok", fact=f"All requirements of radixrt[{extra}] are met."
        )


def _is_meant(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _is_met(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _state(name: str) -> str:
    version = _version(name)
    return "is not installed" if version is None else f"{version} is installed"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
