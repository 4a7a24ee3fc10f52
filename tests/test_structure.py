"""The house keeps its walls: what each process may import."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "radixrt"
RUNTIME = {"api", "tokenizer", "scheduler", "worker", "engine", "launch", "messages", "ipc"}
PROCESSES = {"api", "tokenizer", "scheduler", "worker"}
NO_TORCH = [
    "radixrt",
    "radixrt.cli",
    "radixrt.launch",
    "radixrt.engine_client",
    "radixrt.scheduler.process",
    "radixrt.api.server",
    "radixrt.constrained.compiler.pool",
    "radixrt.constrained.compiler.process",
    "radixrt.constrained.loader",
]


@pytest.mark.parametrize("module", NO_TORCH)
def test_only_the_worker_needs_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_processes_share_messages_and_no_code(process: str) -> None:
    for file in (PACKAGE / process).glob("*.py"):
        for module in imported_modules(file):
            parts = module.split(".")
            if parts[0] == "radixrt" and len(parts) > 1:
                assert parts[1] not in PROCESSES - {process}, f"{file} imports {module}"


def test_the_language_needs_the_runtime_only_for_an_engine_in_its_process() -> None:
    for file in (PACKAGE / "lang").rglob("*.py"):
        if file.name != "engine.py":
            for module in imported_modules(file):
                assert module.split(".")[0] not in ("torch", "numpy"), f"{file} imports {module}"
                assert module.partition("radixrt.")[2].split(".")[0] not in RUNTIME, file


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions count: they hide a circle, they don't open it. Those for types alone don't."""
    files = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    imports = {
        name: {module for module in imported_modules(file) if module in files} - {name}
        for name, file in files.items()
    }
    list(
        graphlib.TopologicalSorter(imports).static_order()
    )  # raises CycleError, which names the circle


def test_nothing_is_unpickled_and_no_shell_is_started() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert not {"pickle", "marshal", "shelve", "dill"} & set(imported_modules(file)), file
        assert "shell=True" not in text and "recv_pyobj" not in text and "send_pyobj" not in text, (
            file
        )


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path) -> list[str]:
    """The modules that a run of ``file`` may import, and the names imported from them, which may be modules too."""
    tree = ast.parse(file.read_text())
    for_types = {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    }
    names = []
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
