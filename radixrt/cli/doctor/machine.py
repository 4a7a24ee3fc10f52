"""Checks Python and its packages, kernels, GPU, memory, files and the port."""

import http.client
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from packaging.requirements import Requirement

from radixrt import __version__
from radixrt.base.channels import Channels
from radixrt.base.errors import ConfigError
from radixrt.base.server_url import local_url
from radixrt.device.machine import available_memory, shared_huge_pages
from radixrt.supervisor.launch import bind

_GIB = 1 << 30
MIN_MEMORY = 2 * _GIB
"""The processes of a server with the built-in model need about 1.5 GiB."""
MIN_DISK = 2 * _GIB
MIN_FILES = 4096
"""Open files; each connection is one."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    subject: str
    """The thing that was checked, such as ``kernels``."""
    level: Literal["ok", "warning", "error"]
    """error: a server does not start here; warning: it runs worse than it could."""
    fact: str
    """One line."""
    advice: str = ""
    """The next step; empty where there is nothing to do."""


def verdict(subject: str, is_good: bool, fact: str, advice: str) -> Finding:
    """A finding that is ok, or a warning with its advice."""
    return Finding(subject, "ok", fact) if is_good else Finding(subject, "warning", fact, advice)


def python() -> Iterator[Finding]:
    """Versions of radixrt and Python, and the system."""
    place = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's environment"
    yield Finding(
        "versions",
        "ok",
        f"radixrt {__version__}, Python {platform.python_version()} in {place}, {platform.platform(terse=True)}, {platform.machine()}",
    )


def packages(extra: str = "server") -> Iterator[Finding]:
    """The requirements of ``radixrt[extra]``."""
    try:
        requirements = importlib.metadata.requires("radixrt") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            "warning",
            "radixrt runs from a folder and is not installed, so its requirements are unknown.",
            "Run `pip install -e '.[server]'` in the checkout.",
        )
        return
    wrong = 0
    for one in map(Requirement, requirements):
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            version = importlib.metadata.version(one.name)
            state = f"{version} is installed"
        except importlib.metadata.PackageNotFoundError:
            version, state = None, "is not installed"
        if version is None or not one.specifier.contains(version, prereleases=True):
            wrong += 1
            needed = f"{one.name}{one.specifier}"
            advice = f"Run `pip install '{needed}'`."
            yield Finding("packages", "error", f"{needed} is needed, and {state}.", advice)
    if not wrong:
        yield Finding("packages", "ok", f"All requirements of radixrt[{extra}] are met.")


def kernels() -> Iterator[Finding]:
    """Instruction set and self check of the native kernels."""
    import radixrt_kernels

    native = radixrt_kernels.native
    if native is None:
        yield Finding(
            "kernels",
            "warning",
            "The native CPU kernels are not used; models run several times slower on the CPU.",
            f"{radixrt_kernels.missing_because[:1].upper()}{radixrt_kernels.missing_because[1:]}.",
        )
        return
    from radixrt_kernels.self_check import CHECKS

    checks = [check for family in CHECKS for check in family()]
    wrong = [check.name for check in checks if not check.passed]
    sets = f"{native.isa()} of {', '.join(native.usable_isas())}"
    if wrong:
        yield Finding(
            "kernels",
            "error",
            f"Instruction set {sets}: wrong results of {', '.join(wrong)}.",
            "Serve with RADIXRT_KERNELS=off, and report it with the name of the processor.",
        )
        return
    yield Finding(
        "kernels",
        "ok",
        f"Instruction set {sets}; {len(checks)} kernel checks are right; {native.num_threads()} threads.",
    )


def gpu() -> Iterator[Finding]:
    """GPU and FlashInfer."""
    import torch

    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        present = Path("/proc/driver/nvidia").exists()
        yield verdict(
            "GPU",
            not present,
            f"torch {torch.__version__} (built for {built}) sees no GPU; models run on the CPU.",
            "This machine has an NVIDIA driver: install a torch that is built for CUDA, from pytorch.org.",
        )
        return
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    free, total = torch.cuda.mem_get_info()
    fact = f"{names}; {free / _GIB:.1f} of {total / _GIB:.1f} GiB free; torch {torch.__version__}"
    try:
        from radixrt.device.device import load_flashinfer

        version = load_flashinfer().__version__
    except Exception as error:  # whatever its import does on this machine
        yield Finding(
            "GPU",
            "error",
            f"{fact}; FlashInfer cannot be imported ({type(error).__name__}: {error}).",
            "Run `pip install 'radixrt[cuda]'`, with a FlashInfer that fits this torch.",
        )
        return
    yield Finding("GPU", "ok", f"{fact}; FlashInfer {version}")


def memory() -> Iterator[Finding]:
    """Memory for weights and KV cache, and the processors that may be used."""
    available = available_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield verdict(
        "memory",
        available >= MIN_MEMORY,
        f"{available / _GIB:.1f} GiB of memory available, {cores} processors.",
        "Free memory, or raise the limit of the container: weights and KV cache have to fit.",
    )
    pages = shared_huge_pages()
    yield Finding(
        "shared KV",
        "ok",
        f"Pages of 2 MiB in shared memory: {pages or 'unknown'} (shmem_enabled).",
        "As root: `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`. The KV of a worker that dies is then kept."
        if pages in ("never", "deny")
        else "",
    )


def files() -> Iterator[Finding]:
    """Folders for sockets, shared memory and downloads, and the limit of open files."""
    try:
        shutil.rmtree(Channels.make_run_dir())
        yield Finding("sockets", "ok", f"Sockets can be made in {tempfile.gettempdir()}.")
    except (OSError, ConfigError) as error:
        yield Finding(
            "sockets",
            "error",
            f"No folder for sockets can be made in {tempfile.gettempdir()}: {error}",
            "Set TMPDIR to a folder with a short path in which you may write.",
        )
    yield from _downloads()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_FILES:
        yield Finding(
            "open files",
            "warning",
            f"A process may open {most} files, so the server takes fewer connections than that.",
            "Raise the limit: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or --ulimit of the container.",
        )


def _downloads() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        fact, advice = (
            f"{folder} is not writable, so no model can be downloaded.",
            "Set HF_HOME to a folder in which you may write.",
        )
    elif free < MIN_DISK:
        fact, advice = (
            f"{free / _GIB:.1f} GiB of disk are free for models in {folder}.",
            "Free disk space, or set HF_HOME to a folder on another disk.",
        )
    else:
        yield Finding(
            "downloads", "ok", f"Models are kept in {folder}, with {free / _GIB:.0f} GiB free."
        )
        return
    yield Finding("downloads", "warning", fact, advice)


def port(host: str, number: int) -> Iterator[Finding]:
    """Whether a server could listen on the port, or one already does."""
    try:
        bind(host, number).close()
        yield Finding("port", "ok", f"Port {number} on {host} is free.")
        return
    except ConfigError as error:
        reason = str(error)
    if _is_radixrt(host, number):
        yield Finding("port", "ok", f"A radixrt server answers on port {number}.")
    else:
        yield Finding("port", "error", reason, "Choose another port with --port.")


def _is_radixrt(host: str, number: int) -> bool:
    try:
        with urllib.request.urlopen(local_url(host, number), timeout=2) as response:
            return b'"server":"radixrt' in response.read()
    except (OSError, http.client.HTTPException):
        return False
