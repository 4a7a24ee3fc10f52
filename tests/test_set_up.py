"""Set-up where PyTorch's index of CPU builds cannot be reached, with a fake Python and pip; the
content of wheels."""

import json
from pathlib import Path

import pytest

from deploy import set_up_venv
from tools.wheel import content_problems


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up_venv, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(set_up_venv.platform, "system", lambda: "Linux")


def fake_python(folder: Path, *, pip_offers: str, uv: int = 0, has_torch: str = "") -> Path:
    """A Python that records its arguments in ``folder``/calls.

    Args:
        pip_offers: version of torch that pip would install from its own index.
        uv: exit status of an installation from PyTorch's index.
        has_torch: version of the installed torch.
    """
    report = json.dumps({"install": [{"metadata": {"version": pip_offers}}]})
    python = folder / "python"
    python.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
*--dry-run*) echo '{report}' ;;
"-m uv"*) echo "error: Failed to fetch" >&2; exit {uv} ;;
"-c import torch"*) echo '{has_torch}'; test -n '{has_torch}' ;;
esac
"""
    )
    python.chmod(0o755)
    return python


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.usefixtures("no_gpu")
def test_an_unreachable_index_of_cpu_builds_ends_set_up_with_ways_to_go_on(tmp_path: Path) -> None:
    python = fake_python(tmp_path, pip_offers="2.13.0", uv=2)
    with pytest.raises(SystemExit) as end:
        set_up_venv.install_torch(python)
    advice = str(end.value)
    for part in (
        set_up_venv.CPU_INDEX,
        "HTTPS_PROXY",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        f"{python} -m pip install {set_up_venv.TORCH}",
    ):
        assert part in advice
    assert not any(call.endswith(set_up_venv.TORCH) and "--dry-run" not in call and " uv " not in call for call in calls(tmp_path)), "CUDA by itself"  # fmt: skip


@pytest.mark.usefixtures("no_gpu")
def test_an_installed_torch_stays_if_the_index_cannot_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = fake_python(tmp_path, pip_offers="2.13.0", uv=2, has_torch="2.9.1+cpu")
    set_up_venv.install_torch(python)
    assert "torch 2.9.1+cpu stays" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_a_cpu_build_from_pips_own_index_needs_no_other(tmp_path: Path) -> None:
    python = fake_python(tmp_path, pip_offers="2.13.0+cpu", uv=2)
    set_up_venv.install_torch(python)
    assert not any(call.startswith("-m uv") for call in calls(tmp_path))
    assert calls(tmp_path)[-1].endswith(set_up_venv.TORCH)


@pytest.mark.parametrize(("has_gpu", "extras"), [(True, "[dev,cuda]"), (False, "[dev]")])
def test_a_machine_with_a_gpu_gets_flashinfer_beside_its_own_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, extras: str
) -> None:
    monkeypatch.setattr(set_up_venv, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(set_up_venv, "base_python_has_cuda_torch", lambda: True)
    python = fake_python(tmp_path, pip_offers="2.13.0+cpu")
    monkeypatch.setattr(set_up_venv, "run", lambda *command: None)
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    python.rename(venv / "python")
    monkeypatch.setattr("sys.argv", ["set_up_venv.py", str(tmp_path / "venv")])
    set_up_venv.main()
    installs = [
        call for call in calls(tmp_path) if "pip install" in call and "--dry-run" not in call
    ]
    assert installs[-1].endswith(f"--editable {Path(set_up_venv.__file__).parents[1]}{extras}")
    of_torch = [call for call in installs if call.endswith(set_up_venv.TORCH)]
    assert bool(of_torch) == (not has_gpu), "the machine's own CUDA build is kept"


def test_a_failing_pip_ends_set_up_with_the_variables_for_mirrors(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="PIP_INDEX_URL"):
        set_up_venv.pip_install(python, "radixrt")


def test_a_wheel_has_the_files_of_the_checkout_and_the_kernels_but_not_their_sources() -> None:
    tracked = ["radixrt/a.py", "radixrt/page.css", "radixrt_kernels/CMakeLists.txt", "radixrt_kernels/csrc/a.cpp"]  # fmt: skip
    kernels = "radixrt_kernels/_native.cpython-311-x86_64-linux-gnu.so"
    beside = ["radixrt/", "radixrt-0.1.0.dist-info/RECORD", "radixrt.libs/libgomp.so.1"]
    good = ["radixrt/a.py", "radixrt/page.css", kernels, *beside]
    assert content_problems(good, tracked) == []
    bad = ["radixrt/a.py", "radixrt_kernels/csrc/a.cpp", "tests/test_a.py"]
    assert content_problems(bad, tracked) == [
        "no kernels",
        "lacks radixrt/page.css",
        "has radixrt_kernels/csrc/a.cpp",
        "has tests/test_a.py",
    ]
