"""Compiles FlashInfer's kernels ahead, without a GPU: ``python -m tools.flashinfer_kernels``.

    python -m tools.flashinfer_kernels needs MODEL_DIR ...       # what these checkpoints are served
    with python -m tools.flashinfer_kernels build OUT MODEL_DIR ...   # compile that into OUT python
    -m tools.flashinfer_kernels build OUT --only norm     # compile single modules python -m
    tools.flashinfer_kernels build OUT --gpu-check     # what `make gpu-check` calls; an hour of a
    core python -m tools.flashinfer_kernels install OUT               # copy OUT into the installed
    FlashInfer

FlashInfer compiles a kernel when it is first called, which takes minutes and a compiler. A module
that lies in ``flashinfer/data/aot`` is loaded as it is instead. It depends on the CUDA major
version and on FlashInfer's own, but neither on torch nor on Python. Needs flashinfer-python, torch
(a CPU build will do), ninja, a C++ compiler and nvcc 12.8 or newer: of a CUDA toolkit, or in this
environment PyPI's nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-cccl and
nvidia-cuda-runtime, all of one minor version (pip alone takes a newer nvvm, whose output ptxas
refuses).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "kernels.json"
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, order=True)
class Attention:
    """What decides an attention module; head counts, page size and masks are given at run time."""

    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: bool = False
    soft_cap: bool = False

    @property
    def label(self) -> str:
        parts = [f"d{self.head_dim}", self.dtype]
        parts += ["fp8kv"] * (self.kv_dtype == FP8)
        parts += ["window"] * self.window + ["softcap"] * self.soft_cap
        return "-".join(parts)


LAST_OF_AN_ERROR = 1500
"""Characters; a compiler's whole output is pages."""

LAYERS = ("norm", "rope", "page", "cascade")
"""Modules that every model is served with."""

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""A config's ``hidden_act`` and FlashInfer's name for it."""


# ---------------------------------------------------------------- what a model needs


def needs(config: dict[str, Any], kv_cache_dtype: str = "auto") -> list[str]:
    """Names of the modules that a checkpoint is served with.

    Args:
        config: of its config.json.
        kv_cache_dtype: the server's flag.
    """
    config = config.get("text_config", config)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = dtype if dtype in ("bfloat16", "float16") else "bfloat16"
    heads = config["num_attention_heads"]
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    kv_dtype = FP8 if kv_cache_dtype == "fp8_e4m3" else dtype
    names = [*LAYERS, ACTIVATIONS.get(activation, "silu")]
    if latent := config.get("kv_lora_rank"):
        return names + _kernels_of_latents(latent, config["qk_rope_head_dim"], dtype)
    for window in _windows(config):
        attention = Attention(
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=window,
            soft_cap=bool(config.get("attn_logit_softcapping")),
        )
        names += _kernels_of(attention)
    return list(dict.fromkeys(names))


def _kernels_of(attention: Attention) -> list[str]:
    # FA3 takes an 8-bit cache with 8-bit queries alone.
    kernels = ["fa2", "decode"] + (["fa3"] if attention.kv_dtype == attention.dtype else [])
    return [f"{kernel}:{attention.label}" for kernel in kernels]


def _kernels_of_latents(latent: int, rope: int, dtype: str) -> list[str]:
    return [f"mla_{kernel}:{latent}-{rope}-{dtype}" for kernel in ("fa2", "fa3")]


def needs_of_gpu_check() -> list[str]:
    """What ``tests/gpu`` and the models of ``bench/gpu`` call; tests skip for what is missing."""
    kinds = [
        Attention(128),
        Attention(128, kv_dtype=FP8),
        Attention(128, window=True),
        Attention(128, soft_cap=True),
        Attention(128, window=True, soft_cap=True),
        Attention(64),
    ]
    kernels = [name for kind in kinds for name in _kernels_of(kind)]
    return [*LAYERS, *ACTIVATIONS.values(), *kernels, *_kernels_of_latents(512, 64, "bfloat16")]


def _windows(config: dict[str, Any]) -> list[bool]:
    """Whether layers look at everything, at a window, or some at each."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [False]
    kinds = set(config.get("layer_types") or ())
    if config.get("model_type") in ("gemma2", "gemma3_text", "qwen2") or "full_attention" in kinds:
        return [False, True]
    return [True]


# ---------------------------------------------------------------- modules by name


def specification(name: str) -> Any:
    """FlashInfer's build specification of a module: ``norm``, ``silu``,
    ``fa2:d128-bfloat16-window``, ...

    Raises:
        ValueError: there is no such module.
    """
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module

    plain: dict[str, Callable[[], Any]] = {
        "norm": gen_norm_module,
        "rope": gen_rope_module,
        "page": gen_page_module,
        "cascade": gen_cascade_module,
    }
    kernel, _, label = name.partition(":")
    if kernel in plain:
        return plain[kernel]()
    if kernel in ACTIVATIONS.values():
        return gen_act_and_mul_module(kernel)
    if kernel in ("mla_fa2", "mla_fa3") and label:
        return _latent_module(kernel.removeprefix("mla_"), label)
    if kernel in ("fa2", "fa3", "decode") and label:
        return _attention_module(kernel, _parse(label))
    raise ValueError(
        f"{name!r} is no module; write one of {', '.join([*plain, *ACTIVATIONS.values()])}, or fa2:, fa3:, "
        "decode:, mla_fa2: or mla_fa3: and what follows it in the output of 'needs'."
    )


def _parse(label: str) -> Attention:
    head_dim, dtype, *flags = label.split("-")
    kv_dtype = FP8 if "fp8kv" in flags else dtype
    return Attention(int(head_dim[1:]), dtype, kv_dtype, "window" in flags, "softcap" in flags)


def _latent_module(kernel: str, label: str) -> Any:
    import torch
    from flashinfer.jit.attention import gen_batch_mla_module

    latent, rope, name = label.split("-")
    dtype, profiles = getattr(torch, name), False
    return gen_batch_mla_module(
        kernel, dtype, dtype, dtype, torch.int32, int(latent), int(rope), profiles
    )


def _attention_module(kernel: str, attention: Attention) -> Any:
    import torch
    from flashinfer.jit import attention as generators
    from flashinfer.jit.attention import modules

    query, key = getattr(torch, attention.dtype), getattr(torch, attention.kv_dtype)
    dtypes: tuple[Any, ...] = (query, key, query, torch.int32)
    no_rotation = 0
    shape: tuple[Any, ...] = (attention.head_dim, attention.head_dim, no_rotation, attention.window, attention.soft_cap)  # fmt: skip
    if kernel == "decode":
        return generators.gen_batch_decode_module(*dtypes, *shape)
    half_precision_scores = False
    if kernel == "fa3":
        return generators.gen_batch_prefill_module("fa3", *dtypes, *shape, half_precision_scores)
    # The wrappers ask for the module that relies on K and V having equal strides; the public
    # generator makes the other one.
    return modules._gen_batch_prefill_primary_module("fa2", *dtypes, *shape, half_precision_scores)


# ---------------------------------------------------------------- compiling


def build(out: Path, names: list[str], *, arch: str, jobs: int) -> list[str]:
    """Compile modules into ``out/<uri>/<uri>.so``; those that are there already are passed over.

    ``kernels.json`` is written after each, so what an interrupted build has made can be used.

    Returns:
        names of the modules that could not be compiled
    """
    scratch = Path(tempfile.gettempdir()) / "radixrt-flashinfer-build"
    _configure(scratch, arch, jobs)
    from flashinfer.jit.core import build_jit_specs

    def compile_module(module: Any) -> Path:
        build_jit_specs([module], verbose=False, skip_prebuilt=False)
        return Path(module.jit_library_path)

    return build_each(out, names, arch, compile_module)


def build_each(
    out: Path, names: list[str], arch: str, compile_module: Callable[[Any], Path]
) -> list[str]:
    """Build, with ``compile_module`` to compile a specification; it returns the library's path."""
    version = installed_version()
    out.mkdir(parents=True, exist_ok=True)
    manifest = out / MANIFEST
    record = json.loads(manifest.read_text()) if manifest.exists() else {"modules": {}}
    if record.get("flashinfer", version) != version or record.get("arch", arch) != arch:
        sys.exit(
            f"{manifest} is of FlashInfer {record['flashinfer']} for {record['arch']}; choose another folder."
        )
    record |= {"flashinfer": version, "arch": arch}
    failed = []
    for name in names:
        module = specification(name)
        target = out / module.name / f"{module.name}.so"
        if target.exists():
            print(f"{name}: there already", flush=True)
        else:
            begin = os.times()
            try:
                _copy_whole(compile_module(module), target)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed.append(name)
                print(f"{name}: failed. {str(error)[-LAST_OF_AN_ERROR:]}", flush=True)
                continue
            print(f"{name}: {_cost(begin)}, {target.stat().st_size / 1e6:.1f} MB", flush=True)
        record["modules"][name] = module.name
        manifest.write_text(json.dumps(record, indent=1) + "\n")
    return failed


def _copy_whole(library: Path, target: Path) -> None:
    """A copy that is there completely or not at all."""
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    shutil.copy2(library, partial)
    partial.replace(target)


def _cost(begin: os.times_result) -> str:
    """Time since ``begin``, and of it what the compilers have computed."""
    now = os.times()
    cpu = now.children_user + now.children_system - begin.children_user - begin.children_system
    return f"{now.elapsed - begin.elapsed:.0f} s, {cpu:.0f} s of CPU"


def _configure(scratch: Path, arch: str, jobs: int) -> None:
    """What FlashInfer reads from the environment, before it is imported."""
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(scratch)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["MAX_JOBS"] = str(jobs)
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja of this environment
    )
    cuda = _cuda_folder()
    if cuda.exists():
        os.environ["CUDA_HOME"] = str(cuda.resolve())
    headers, libraries = _missing_cuda_parts(cuda, scratch / "cuda-parts")
    flags = " ".join(f"-isystem {folder}" for folder in headers)
    os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = os.environ["FLASHINFER_EXTRA_CFLAGS"] = flags
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = " ".join(f"-L{folder}" for folder in libraries)


def _cuda_folder() -> Path:
    """CUDA_HOME, or else where NVIDIA's wheels of this environment lie if nvcc is among them, or
    else the toolkit's usual place."""
    if "CUDA_HOME" in os.environ:
        return Path(os.environ["CUDA_HOME"])
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            return nvcc.parent.parent
    return Path("/usr/local/cuda")


def _missing_cuda_parts(cuda: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """Headers and libraries that an nvcc without the whole toolkit lacks. The headers come from
    NVIDIA's wheels; libcuda, which belongs to the driver, is an empty library to link against;
    libcudart is in the wheel under its full name alone."""
    headers, libraries = [], []
    lacking = {
        package: header
        for package, header in (("nvidia-curand", "curand.h"), ("nvidia-cublas", "cublasLt.h"))
        if not (cuda / "include" / header).exists()
    }
    if lacking:
        headers.append(folder / "include")
        for package, header in lacking.items():
            if not (folder / "include" / header).exists():
                _headers_of(package, folder / "include")
    if not any((cuda / place / "libcuda.so").exists() for place in ("lib64/stubs", "lib/stubs")):
        libraries.append(folder / "lib")
        if not (folder / "lib/libcuda.so").exists():
            _empty_library(folder / "lib/libcuda.so", "libcuda.so.1")
    runtimes = sorted(cuda.glob("lib*/libcudart.so.*"))
    if runtimes and not any((cuda / place / "libcudart.so").exists() for place in ("lib64", "lib")):
        link = folder / "lib/libcudart.so"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(runtimes[0].resolve())
        libraries.append(link.parent)
    return headers, list(dict.fromkeys(libraries))


def _headers_of(package: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels]
        subprocess.run([*download, package], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if "/include/" in name and name.endswith((".h", ".hpp", ".cuh")):
                        (folder / Path(name).name).write_bytes(archive.read(name))


def _empty_library(path: Path, soname: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text("int nothing;\n")
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(path), str(source)]
    subprocess.run(command, check=True)


# ---------------------------------------------------------------- installing


def installed_version() -> str:
    """FlashInfer's, without importing it: that needs more packages than reading its files does.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("flashinfer-python is not installed here.")


def modules_of(built: Path) -> Iterator[Path]:
    """The compiled modules of a folder that ``build`` made, as paths in it.

    Raises:
        SystemExit: it is of another FlashInfer than the one installed.
    """
    version = installed_version()
    record = json.loads((built / MANIFEST).read_text())
    if record["flashinfer"] != version:
        sys.exit(
            f"{built} is of FlashInfer {record['flashinfer']}, and {version} is installed; build it again."
        )
    for uri in record["modules"].values():
        yield Path(uri) / f"{uri}.so"


def install(built: Path) -> None:
    """Copy compiled modules to where FlashInfer looks first."""
    specification = importlib.util.find_spec("flashinfer")
    if specification is None or specification.origin is None:
        sys.exit("flashinfer-python is not installed here.")
    place = Path(specification.origin).parent / "data/aot"
    for module in modules_of(built):
        (place / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built / module, place / module)
        print(place / module)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.flashinfer_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("needs", "build"):
        command = commands.add_parser(name)
        if name == "build":
            command.add_argument("out", type=Path)
            command.add_argument("--only", nargs="+", default=[], metavar="MODULE")
            command.add_argument("--gpu-check", action="store_true", help="also what `make gpu-check` calls")  # fmt: skip
            command.add_argument("--arch", default="9.0a", help="default: %(default)s, for H100 and H200")  # fmt: skip
            command.add_argument("--jobs", type=int, default=os.cpu_count())
        command.add_argument("models", nargs="*", type=Path, metavar="MODEL_DIR")
        command.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8_e4m3"])
    commands.add_parser("install").add_argument("built", type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.command == "install":
        install(parsed.built)
        return
    configs = [json.loads((model / "config.json").read_text()) for model in parsed.models]
    names = [name for config in configs for name in needs(config, parsed.kv_cache_dtype)]
    if parsed.command == "build":
        names += [*parsed.only, *(needs_of_gpu_check() if parsed.gpu_check else [])]
    names = list(dict.fromkeys(names))
    if parsed.command == "needs":
        print("\n".join(names))
    else:
        failed = build(parsed.out, names, arch=parsed.arch, jobs=parsed.jobs)
        if failed:
            sys.exit(f"Not compiled: {', '.join(failed)}. All others are in {parsed.out}.")


if __name__ == "__main__":
    main(sys.argv[1:])
