"""``radixrt doctor``, ``radixrt models`` and ``radixrt completion``."""

import argparse
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from radixrt.cli.doctor import machine, models
from radixrt.cli.main import main
from radixrt.models.local import LocalModel, local_models
from tests.command_line import run_here


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    run = [sys.executable, "-m", "radixrt.cli", *arguments]
    return subprocess.run(
        run, capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def test_a_taken_port_is_an_error_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken, pytest.raises(SystemExit, match="1"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        main(["doctor", "--port", str(taken.getsockname()[1]), "--json"])
    findings = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["port"]["level"] == "error"
    assert "--port" in findings["port"]["advice"]
    assert {"versions", "packages", "kernels", "GPU", "memory", "sockets", "downloads"} <= set(
        findings
    )


def test_missing_kernels_are_a_warning_with_advice() -> None:
    done = command("doctor", "--port", "0", "--json", RADIXRT_KERNELS="off")
    kernels = next(f for f in json.loads(done.stdout) if f["subject"] == "kernels")
    assert kernels["level"] == "warning"
    assert "RADIXRT_KERNELS=off" in kernels["advice"]


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["orjson>=99", "nosuchpackage>=1 ; extra == 'server'", "alsomissing ; extra == 'lang'"]
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: wanted)
    findings = list(machine.packages())
    assert [finding.level for finding in findings] == ["error", "error"]
    assert "orjson>=99 is needed" in findings[0].fact
    assert "nosuchpackage>=1 is needed, and is not installed" in findings[1].fact


def test_little_memory_and_a_long_folder_for_sockets_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    assert [finding.level for finding in machine.memory()] == ["warning", "ok"]
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(machine.tempfile, "tempdir", str(deep))
    assert next(iter(machine.files())).level == "error"


def test_the_setting_that_lets_kv_outlive_a_worker_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting in ("never", "deny", "advise", ""):
        monkeypatch.setattr(machine, "shared_huge_pages", lambda setting=setting: setting)
        (shared,) = [one for one in machine.memory() if one.subject == "shared KV"]
        assert (setting or "unknown") in shared.fact
        assert ("shmem_enabled" in shared.advice) == (setting in ("never", "deny"))


def test_models_lists_the_hub_cache_with_reasons(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    for name, source in (("good", checkpoint("llama")), ("strange", None)):
        snapshot = tmp_path / f"models--maker--{name}" / "snapshots" / "abc"
        if source is None:
            snapshot.mkdir(parents=True)
            (snapshot / "config.json").write_text(json.dumps({"architectures": ["T5Model"]}))
        else:
            shutil.copytree(source, snapshot)
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    write_strange_file(tmp_path)
    good, file, strange = local_models()
    assert (file.name, file.bytes) == ("hf:maker/packed:Q4_K_M", 3)
    assert "gguf" in str(file.reason).lower()
    assert (good.name, good.reason, strange.name) == ("maker/good", None, "maker/strange")
    assert good.bytes > 0
    assert "Not yet: T5Model" in str(strange.reason)


def test_each_model_is_a_line_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = LocalModel(name="/a/very/long/path" * 10, bytes=10**9, reason="no reason at all " * 10)
    monkeypatch.setattr(models, "local_models", lambda folders: iter([long, long]))
    assert models.run(argparse.Namespace(json=False, folders=[])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", long.name, long.name, "demo"]


def test_a_terminal_shows_whole_names_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name is copied from there."""
    long = LocalModel(name="hf:maker/" + "long-" * 20 + ":Q4_K_M", bytes=10**9, reason="x " * 99)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(models, "local_models", lambda folders: iter([long]))
    monkeypatch.setattr(models, "Console", partial(Console, force_terminal=True))
    assert models.run(argparse.Namespace(json=False, folders=[])) == 0
    assert long.name in capsys.readouterr().out


def test_checkpoints_in_folders_are_listed_and_a_reason_does_not_repeat_the_name(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "mine" / "good")
    broken = tmp_path / "mine" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    (broken / "model.safetensors").write_bytes(b"")
    found = {
        Path(one.name).name: one for one in local_models([tmp_path]) if str(tmp_path) in one.name
    }
    assert found["good"].reason is None and found["good"].bytes > 0
    assert found["good"].name == str(tmp_path / "mine" / "good")
    assert str(broken) not in str(found["broken"].reason)


def write_strange_file(hub: Path) -> None:
    """A damaged GGUF file in the hub's cache."""
    file = hub / "models--maker--packed" / "snapshots" / "abc" / "tiny-Q4_K_M.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGU")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid_and_knows_the_flags(shell: str) -> None:
    script = run_here("completion", shell).stdout
    assert "max-step-ms" in script and "max-model-len" not in script
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=script, text=True, capture_output=True, timeout=20
        )
        assert (checked.returncode, checked.stderr) == (0, "")
