"""The house keeps its walls: what each process may import."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "radixrt"
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


def test_each_room_imports_what_the_architecture_lets_it() -> None:
    rooms = rooms_of_the_docs()
    trespasses = [
        f"{name} imports {module}"
        for name, file in MODULES.items()
        for module in imported_modules(file)
        if module in MODULES and not rooms.lets(name, module)
    ]
    assert not trespasses


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_no_process_imports_another(process: str) -> None:
    """Whatever the table says."""
    assert not PROCESSES & rooms_of_the_docs().allowed[process]


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_the_language_needs_no_such_package(package: str) -> None:
    for file in (PACKAGE / "lang").rglob("*.py"):
        assert package not in {module.split(".")[0] for module in imported_modules(file)}, file


def test_kernels_import_nothing_of_the_engine() -> None:
    for file in (PACKAGE.parent / "radixrt_kernels").rglob("*.py"):
        assert "radixrt" not in {module.split(".")[0] for module in imported_modules(file)}, file


def test_only_rooms_that_compute_call_kernels() -> None:
    for name, file in MODULES.items():
        if any(module.startswith("radixrt_kernels") for module in imported_modules(file)):
            assert rooms_of_the_docs().room_of(name) in ("attention", "layers", "worker"), name


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions count, and those for types: they hide a circle, they don't open it."""
    imports = {
        name: {module for module in imported_modules(file) if module in MODULES} - {name}
        for name, file in MODULES.items()
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


class Rooms(NamedTuple):
    """The table of docs/architecture.md."""

    paths: dict[str, str]
    """Room of each module or package."""
    allowed: dict[str, set[str]]
    """What each room may import."""

    def room_of(self, module: str) -> str:
        """That of the longest path that leads to it."""
        path = module
        while path not in self.paths:
            path = path.rpartition(".")[0]
            assert path, f"{module} is in no room of docs/architecture.md"
        return self.paths[path]

    def lets(self, module: str, imported: str) -> bool:
        if imported == "radixrt" or imported.startswith(module + "."):
            return True  # the version; and a package's face hands on what is in it
        own = self.room_of(module)
        return self.room_of(imported) in {own, *self.allowed[own]}


@cache
def rooms_of_the_docs() -> Rooms:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = Rooms({}, {})
    for room, files, allowed in re.findall(r"^\| ([a-z ]+) \| (`[^|]*) \| ([^|]*)\|$", text, re.M):
        if room == "room" or "never does" in allowed:
            continue
        paths = re.findall(r"`([^`]+)`", files)
        rooms.paths.update({"radixrt." + path.strip("/").replace("/", "."): room for path in paths})
        rooms.allowed[room] = {name for name in allowed.strip().split(", ") if name}
    assert len(rooms.allowed) > 15
    assert set().union(*rooms.allowed.values()) <= rooms.allowed.keys()
    return rooms


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path) -> list[str]:
    """The modules that a file imports anywhere, for types too, and the names imported from them, which may be modules."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


MODULES = {module_name(file): file for file in PACKAGE.rglob("*.py")}
