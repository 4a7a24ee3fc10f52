"""Names everything that the bits of the KV depend on: KV on disk is used only where all of it is
the same.

Weights are known by the digest of their files. A digest is kept in the user's cache with the file's
inode, times and size, so each file is read once for it.
"""

import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import nn

import radixrt
import radixrt_kernels
from radixrt.attention.backend import AttentionSetup
from radixrt.base.config import ServerConfig
from radixrt.base.user_cache import drop_oldest, sealed, unsealed, user_cache
from radixrt.layers.matrix import Weights
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.models.checkpoint import weight_files
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.head_files import eagle_folder

log = logging.getLogger(__name__)

_MAX_FILES = 1024
_PIECE_BYTES = 1 << 22
_CODE = ("attention", "layers", "models", "worker")
"""Folders of radixrt whose code computes."""
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
"""Environment variables with which the libraries behind torch choose their code."""
_CPU_FACTS = (
    "vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU architecture", "CPU variant", "CPU part",
)  # fmt: skip
"""Of Linux, in /proc/cpuinfo."""
_NATIVE = ("radixrt.layers.kernels.native", "radixrt.layers.quantization.blocks")
"""Modules whose matrices the native kernels multiply."""
_VISION = "radixrt.models.vision."
_ROTARY_ROWS = 1024
"""Rows of a rotary table that show how it is computed."""


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """A file and its digest."""

    path: str
    stat: list[int]
    digest: str


def begin_weights_digest(config: ServerConfig) -> "Future[str]":
    """Hash the files of the weights in a thread, while they are loaded."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="digest")
    digest = pool.submit(weights_digest, config)
    pool.shutdown(wait=False)
    return digest


def weights_digest(config: ServerConfig) -> str:
    """The digest of all files of a checkpoint's weights: 64 hex digits; of dummy weights their
    seed."""
    if config.load_format == "dummy":
        return f"dummy {config.random_seed}"
    digests = [f"{file.name} {file_digest(file)}" for file in _files_of_weights(config)]
    return _digest_of("\n".join(digests).encode())


def _files_of_weights(config: ServerConfig) -> list[Path]:
    folder = Path(config.model_path)
    entries = gguf_tensors(folder)
    if entries is None:
        return weight_files(folder)
    return [Path(path) for path in sorted({entry.file for entry in entries})]


def stats_of_files(config: ServerConfig) -> str:
    """A digest of times and sizes of the files of weights, of a draft head's too, of kernels and of
    code. During the life of a server it stands for their content, which takes longer to read."""
    files = [] if config.load_format == "dummy" else _files_of_weights(config)
    files += _files_of_head(config)
    if radixrt_kernels.native is not None:
        files.append(Path(str(radixrt_kernels.native.__file__)))
    files += [file for folder in _code_folders() for file in folder.rglob("*.py")]
    stats = [(str(file), file.stat()) for file in sorted(files)]
    lines = [f"{name} {one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}" for name, one in stats]  # fmt: skip
    return _digest_of("\n".join(lines).encode())


def kv_parts(
    config: ServerConfig,
    model: CausalLM,
    setup: AttentionSetup,
    backend_name: str,
    weights: str,
    machine: dict[str, str],
) -> dict[str, str]:
    """What the bits of the KV depend on, by name.

    Args:
        machine: the parts that are the same for all models, see :func:`machine_parts`.
    """
    return machine | {
        "cpu": machine_cpu() if _torch_multiplies(model, backend_name) else "",
        "weights": weights,
        "config": _digest_of((Path(config.model_path) / "config.json").read_bytes()),
        "model": type(model).__name__,
        "dtype": str(setup.dtype),
        "quantization": config.quantization,
        "ranks": f"{config.tp} {config.expert_groups}",
        "rotary": _rotary_digest(model),
        "kv": _digest_of("\n".join(map(str, setup.kv_specs)).encode()),
        "kv_dtype": str(setup.kv_dtype),
        "page_size": str(setup.page_size),
        "states": _digest_of(repr(model.state_specs()).encode()),
        "attention": backend_name,
        **_head_parts(config, setup),
    }


def _head_parts(config: ServerConfig, setup: AttentionSetup) -> dict[str, str]:
    """The draft head, whose KV is in the same pages on disk. It has no part in any answer."""
    if not setup.head_specs or config.cache_dir is None:
        return {}
    digests = [file_digest(file) for file in _files_of_head(config)]
    parts = digests + [str(spec) for spec in setup.head_specs]
    return {"head": _digest_of("\n".join(parts).encode())}


def _files_of_head(config: ServerConfig) -> list[Path]:
    """The files of an EAGLE-3 head; the weights of other heads are among the model's."""
    folder = eagle_folder(config)
    return [] if folder is None else [folder / "config.json", *weight_files(folder)]


def machine_parts() -> dict[str, str]:
    """Those that are the same for all models on this machine."""
    native = radixrt_kernels.native
    return {
        "isa": "torch" if native is None else str(native.isa()),
        "kernels": "" if native is None else file_digest(Path(str(native.__file__))),
        "code": _code_digest(),
        "version": radixrt.__version__,
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {_digest_of(torch.__config__.show().encode())}",
        "transformers": importlib.metadata.version("transformers"),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
    }  # fmt: skip


def machine_cpu() -> str:
    """The CPU: the libraries behind torch choose their code by it."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(line.replace("\t", "").split(":", 1) for line in first.splitlines() if ":" in line)
    named = " ".join(facts[name].strip() for name in _CPU_FACTS if name in facts)
    flags = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    return f"{platform.machine()} {named} {_digest_of(flags.encode())}"


def _torch_multiplies(model: CausalLM, backend_name: str) -> bool:
    """Whether products of a model are computed by torch, beside the native kernels or without
    them."""
    if radixrt_kernels.native is None or backend_name != "cpu":
        return True
    return any(
        type(one).__module__.startswith(_VISION)
        or isinstance(one, nn.Linear)
        or (isinstance(one, Weights) and type(one).__module__ not in _NATIVE and not _is_empty(one))
        for one in model.modules()
    )


def _is_empty(weights: Weights) -> bool:
    """Whether they have been taken apart since they were loaded."""
    return not any(one.numel() for one in (*weights.parameters(), *weights.buffers()))


def file_digest(file: Path, hash_file: Callable[[Path], str] | None = None) -> str:
    """SHA-256 of a file in hex digits, from the user's cache if the file has not changed since.

    Args:
        hash_file: computes it; for tests.
    """
    found = file.stat()
    stat = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    path = str(file.absolute())
    try:
        kept = user_cache("digests") / f"{_digest_of(path.encode())[:32]}.msgpack"
        known = msgspec.msgpack.decode(unsealed(kept.read_bytes()), type=_Known)
        if (known.path, known.stat) == (path, stat):
            return known.digest
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.info("A kept digest cannot be read: %s", error)
        kept = None
    digest = (hash_file or _hash_file)(file)
    _keep(kept, _Known(path, stat, digest))
    return digest


def _hash_file(file: Path) -> str:
    hashed = hashlib.sha256()
    with file.open("rb", buffering=0) as content:
        while piece := content.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()


def _keep(kept: Path | None, known: _Known) -> None:
    if kept is None:
        return
    part = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(sealed(msgspec.msgpack.encode(known)))
        part.replace(kept)
        drop_oldest(kept.parent, _MAX_FILES)
    except OSError as error:
        log.info("The digest of %s is not kept for the next start: %s", known.path, error)


def _rotary_digest(model: CausalLM) -> str:
    hashed = hashlib.sha256()
    for name, module in model.named_modules():
        if isinstance(module, RotaryEmbedding):
            hashed.update(f"{name} {module.interleaved} ".encode())
            hashed.update(module.cos_sin[:_ROTARY_ROWS].contiguous().numpy().data)
    return hashed.hexdigest()


def _code_digest() -> str:
    """Of the code in Python that computes."""
    hashed = hashlib.sha256()
    for folder in _code_folders():
        for file in sorted(folder.rglob("*.py")):
            hashed.update(f"{folder.name}/{file.relative_to(folder)}\n".encode())
            hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()


def _code_folders() -> list[Path]:
    package = Path(radixrt.__file__).parent
    return [*(package / name for name in _CODE), Path(radixrt_kernels.__file__).parent]


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
