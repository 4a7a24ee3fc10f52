"""Setting up a machine with a GPU: which kernels models need, what is carried, and what the check
runs."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.shapes import LLAMA_31_8B
from tools import flashinfer_kernels, gpu_check, pack_offline
from tools.flashinfer_kernels import LAYERS, needs, needs_of_gpu_check, specification

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "hidden_act": "silu", "dtype": "bfloat16"}
GEMMA2 = {
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "model_type": "gemma2",
    "torch_dtype": "float16",
}


def test_a_model_needs_the_kernels_of_its_layers() -> None:
    wanted = [*LAYERS, "silu", "fa2:d128-bfloat16", "decode:d128-bfloat16", "fa3:d128-bfloat16"]
    assert needs(LLAMA) == wanted


def test_windows_soft_caps_and_an_8_bit_cache_choose_other_kernels() -> None:
    kernels = needs(GEMMA2)
    assert "gelu_tanh" in kernels and "silu" not in kernels
    assert "fa2:d256-float16-softcap" in kernels and "fa2:d256-float16-window-softcap" in kernels
    in_fp8 = needs(LLAMA, kv_cache_dtype="fp8_e4m3")
    assert "fa2:d128-bfloat16-fp8kv" in in_fp8
    assert not any(name.startswith("fa3") for name in in_fp8), "FA3 takes 8-bit queries alone"


def test_latents_have_kernels_of_their_own() -> None:
    latents = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert needs(latents) == [*LAYERS, "silu", "mla_fa2:512-64-bfloat16", "mla_fa3:512-64-bfloat16"]
    assert set(needs(latents)) <= set(needs_of_gpu_check())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("norm", ["norm"]),
        ("fa2:d128-bfloat16", ["batch_prefill", "head_dim_qk_128", "use_swa_False", "kv_stride_equal"]),
        ("fa2:d256-float16-window-softcap", ["use_swa_True", "use_logits_cap_True", "head_dim_qk_256"]),
        ("fa3:d128-bfloat16", ["batch_prefill", "sm90"]),
        ("decode:d128-bfloat16-fp8kv", ["batch_decode", "dtype_kv_e4m3"]),
        ("mla_fa2:512-64-bfloat16", ["batch_mla", "head_dim_ckv_512", "head_dim_kpe_64"]),
        ("mla_fa3:512-64-bfloat16", ["batch_mla", "sm90"]),
    ],
)  # fmt: skip
def test_names_stand_for_flashinfers_modules(
    monkeypatch: pytest.MonkeyPatch, name: str, parts: list[str]
) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    module = specification(name)
    assert all(part in module.name for part in parts), module.name


def test_one_command_builds_the_kernels_of_models_of_the_check_and_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    built: list[list[str]] = []
    monkeypatch.setattr(flashinfer_kernels, "build", lambda out, names, **_: built.append(names))
    build = ["build", str(tmp_path / "out"), str(tmp_path)]
    flashinfer_kernels.main(build)
    flashinfer_kernels.main([*build, "--only", "gelu"])
    flashinfer_kernels.main([*build, "--gpu-check"])
    assert built[0] == needs(LLAMA) and built[1] == [*needs(LLAMA), "gelu"]
    assert set(built[2]) == set(needs_of_gpu_check())


def test_the_check_has_the_kernels_of_the_model_that_it_measures() -> None:
    wanted = needs_of_gpu_check()
    assert set(needs(LLAMA_31_8B.config())) <= set(wanted)
    assert len(wanted) == len(set(wanted))


def test_one_command_builds_what_the_check_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(
        flashinfer_kernels, "build", lambda out, names, arch, jobs: built.extend(names)
    )
    flashinfer_kernels.main(["build", str(tmp_path), "--gpu-check"])
    assert built == needs_of_gpu_check()
    built.clear()
    flashinfer_kernels.main(["build", str(tmp_path), "--only", "norm"])
    assert built == ["norm"]


class Module:
    """A build specification."""

    def __init__(self, name: str) -> None:
        self.name = name


def compile_into(folder: Path, broken: str) -> Any:
    """A compiler that fails for one module."""

    def compile_module(module: Module) -> Path:
        if module.name == broken:
            raise RuntimeError("ninja stopped")
        library = folder / f"{module.name}-just-built.so"
        library.write_text(module.name)
        return library

    return compile_module


def test_a_module_that_fails_is_told_and_the_others_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "specification", Module)
    monkeypatch.setattr(flashinfer_kernels, "installed_version", lambda: "1.0")
    out, names = tmp_path / "out", ["norm", "rope", "page"]
    build_each = flashinfer_kernels.build_each
    assert build_each(out, names, "9.0a", compile_into(tmp_path, "rope")) == ["rope"]
    assert "rope: failed. ninja stopped" in capsys.readouterr().out
    assert list(json.loads((out / "kernels.json").read_text())["modules"]) == ["norm", "page"]
    assert not (out / "rope/rope.so").exists()
    assert build_each(out, names, "9.0a", compile_into(tmp_path, "none")) == []
    assert "norm: there already" in capsys.readouterr().out
    built = [path.name for path in flashinfer_kernels.modules_of(out)]
    assert sorted(built) == ["norm.so", "page.so", "rope.so"]


def test_what_a_build_has_made_is_listed_after_each_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "specification", Module)
    monkeypatch.setattr(flashinfer_kernels, "installed_version", lambda: "1.0")

    def interrupted(module: Module) -> Path:
        if module.name == "rope":
            raise KeyboardInterrupt
        return compile_into(tmp_path, "none")(module)

    with pytest.raises(KeyboardInterrupt):
        flashinfer_kernels.build_each(tmp_path / "out", ["norm", "rope"], "9.0a", interrupted)
    assert [path.name for path in flashinfer_kernels.modules_of(tmp_path / "out")] == ["norm.so"]


def test_flashinfers_version_is_known_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it needs packages that reading its files does not."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import would fail
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    (tmp_path / "kernels.json").write_text('{"flashinfer": "1.0", "modules": {"norm": "norm"}}')
    assert list(flashinfer_kernels.modules_of(tmp_path)) == [Path("norm/norm.so")]
    (tmp_path / "kernels.json").write_text('{"flashinfer": "2.0", "modules": {}}')
    with pytest.raises(SystemExit, match=r"of FlashInfer 2\.0"):
        list(flashinfer_kernels.modules_of(tmp_path))


def test_nvccs_wheel_has_its_runtime_under_the_full_name_alone(tmp_path: Path) -> None:
    cuda, parts = tmp_path / "cuda", tmp_path / "parts"
    for file in ("include/curand.h", "include/cublasLt.h", "lib/libcudart.so.13", "lib/stubs/libcuda.so"):  # fmt: skip
        (cuda / file).parent.mkdir(parents=True, exist_ok=True)
        (cuda / file).write_text(file)
    assert flashinfer_kernels._missing_cuda_parts(cuda, parts) == ([], [parts / "lib"])
    assert (parts / "lib/libcudart.so").read_text() == "lib/libcudart.so.13"
    (cuda / "lib/libcudart.so").write_text("a whole toolkit has it")
    assert flashinfer_kernels._missing_cuda_parts(cuda, parts) == ([], [])


def test_an_unknown_module_is_refused_with_the_known_ones() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    with pytest.raises(ValueError, match="norm, rope"):
        specification("fa9:d128-bfloat16")


def test_what_is_carried_covers_what_radixrt_imports_and_no_torch() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    packages = pack_offline.packages(pack_offline.HAVE)
    assert {"msgspec", "pyzmq", "llguidance", "fastapi"} <= packages.keys()
    assert not {"torch", "triton", "numpy", "nvidia-cublas"} & packages.keys()


def test_a_wheel_is_unpacked_without_what_serving_never_compiles(tmp_path: Path) -> None:
    wheel, site = tmp_path / "x-1-py3-none-any.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x/__init__.py", "1")
        archive.writestr("x-1.data/purelib/y.py", "2")
        archive.writestr("x-1.data/scripts/run", "3")
        archive.writestr("flashinfer/data/csrc/fmha_v2/big.cu", "4")
    pack_offline.unpack(wheel, site)
    files = sorted(str(file.relative_to(site)) for file in site.rglob("*") if file.is_file())
    assert files == ["x/__init__.py", "y.py"]


def test_an_archive_of_the_same_content_is_the_same(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "a").mkdir(parents=True)
    (site / "a/one.py").write_text("1")
    stamps, contents = [], []
    for name in ("first", "second"):
        out = tmp_path / name
        out.mkdir()
        stamps.append(pack_offline.write_archive(site, out, 1))
        contents.append((out / f"site-{stamps[-1]}.tar.xz").read_bytes())
    assert stamps[0] == stamps[1] and contents[0] == contents[1]
    with tarfile.open(tmp_path / f"first/site-{stamps[0]}.tar.xz") as archive:
        assert archive.getnames() == ["a/one.py"]


@pytest.mark.parametrize("has_xz", [True, False])
def test_a_carried_folder_unpacks_also_without_the_program_xz(tmp_path: Path, has_xz: bool) -> None:
    site, carry, programs = tmp_path / "site", tmp_path / "carry", tmp_path / "bin"
    for folder in (site, carry, programs):
        folder.mkdir()
    (site / "carried.py").write_text("answer = 42\n")
    stamp = pack_offline.write_archive(site, carry, 1)
    (carry / "use.sh").write_text(pack_offline.USE.format(name="carry", stamp=stamp))
    for name in ("bash", "dirname", "mkdir", "touch", "tar", *["xz"] * has_xz):
        (programs / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} here"))
    (programs / "python3").symlink_to(sys.executable)
    script = f". {carry}/use.sh && python3 -c 'import carried; print(carried.answer)'"
    environment = {"PATH": str(programs), "RADIXRT_SITE": str(tmp_path / "unpacked")}
    done = subprocess.run(
        [programs / "bash", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "42\n", done.stderr


def test_the_check_runs_tests_then_measurements_in_the_time_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], float]] = []

    def note(command: list[str], environment: dict[str, str], limit_s: float) -> int:
        ran.append((command, limit_s))
        return 0

    machine: dict[str, Any] = {"gpu": "a GPU"}
    monkeypatch.setattr(gpu_check, "_machine", lambda: machine)
    monkeypatch.setattr(gpu_check, "_run", note)
    out = tmp_path / "check"
    assert gpu_check.main(["--out", str(out), "--minutes", "8"]) == 0
    (alone, _), (tests, tests_limit), (bench, bench_limit) = ran
    assert "tests/gpu" in tests and "bench.gpu" in bench
    assert all(
        file in alone and tests[tests.index(file) - 1] == "--ignore" for file in gpu_check.ALONE
    )
    assert all((gpu_check.ROOT / file).is_file() for file in gpu_check.ALONE)
    assert tests_limit < 240 and float(bench[bench.index("--budget") + 1]) < bench_limit <= 480
    assert json.loads((out / "machine.json").read_text()) == machine
    with tarfile.open(tmp_path / "check.tar.gz") as archive:
        assert "./machine.json" in archive.getnames()


def test_a_step_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    source = "import time; time.sleep(100)"
    assert gpu_check._run([sys.executable, "-c", source], dict(os.environ), 0.5) == 1
    assert gpu_check._run([sys.executable, "-c", "pass"], dict(os.environ), 60) == 0


def test_a_step_that_is_stopped_can_still_say_what_it_has_found(tmp_path: Path) -> None:
    found = tmp_path / "found"
    source = f"""
import pathlib, time
try:
    time.sleep(100)
finally:
    pathlib.Path({str(found)!r}).write_text("something")
"""
    assert gpu_check._run([sys.executable, "-c", source], dict(os.environ), 3) == 1
    assert found.read_text() == "something"


def test_compiling_can_be_allowed_where_the_shell_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")  # as the script of a carried folder does
    assert gpu_check._environment(jit=False)["FLASHINFER_DISABLE_JIT"] == "1"
    assert gpu_check._environment(jit=True)["FLASHINFER_DISABLE_JIT"] == ""
