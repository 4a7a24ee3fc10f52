"""Benchmarks that left the package keep their old command for one release."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from radixrt.cli.main import main


def status_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def test_the_old_command_warns_and_runs_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("bench", "model", str(tmp_path), "--hidden-size", "128") == 0
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 128
    assert "python -m bench.dummy_checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("overhead", "bench.overhead"),
        ("constrained", "bench.constrained"),
        ("model", "bench.dummy_checkpoint"),
    ],
)
def test_without_a_checkout_it_names_the_command_to_run(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it could not be found
    assert status_of("bench", name, "--help") == 1
    assert f"run 'python -m {module}'" in capsys.readouterr().err


def test_a_module_that_the_successor_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a missing checkout."""

    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(importlib, "import_module", lacking)
    with pytest.raises(ModuleNotFoundError, match="rich"):
        main(["bench", "overhead"])
