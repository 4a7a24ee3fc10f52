"""Folders import only what the table of docs/internals/architecture.md allows."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.suite import SHARED

PACKAGE = Path(__file__).parent.parent / "radixrt"
ENTRY_POINTS = {"radixrt", "radixrt.launch_server"}
PROCESSES = {"api", "tokenizer", "scheduler", "worker"}
NO_TORCH = [
    "radixrt",
    "radixrt.cli.main",
    "radixrt.client.engine_client",
    "radixrt.scheduler.process",
    "radixrt.api.server",
    "radixrt.constrained.compiler.pool",
    "radixrt.constrained.compiler.process",
    "radixrt.constrained.loader",
]
UNUSED = {
    "supervisor.launch": {"torch", "numpy", "tokenizers", "zmq", "asyncio", "jinja2"},
    "scheduler.process": {"torch", "transformers", "tokenizers", "asyncio", "ssl", "jinja2"},
    "tokenizer.process": {"torch", "transformers", "pydantic", "PIL"},
    "api.server": {"torch", "transformers", "tokenizers"},
    "worker.process": {"transformers", "fastapi", "pydantic", "jinja2", "torch._dynamo"},
    "constrained.compiler.process": {"torch", "transformers", "zmq", "asyncio", "pydantic"},
}
"""Libraries that processes start without: each would take up to a CPU second of every start."""


def test_only_the_worker_needs_torch() -> None:
    imports = "\n".join(f"import {name}; 'torch' in sys.modules and sys.exit('{name} imports torch')" for name in NO_TORCH)  # fmt: skip
    done = subprocess.run([sys.executable, "-c", f"import sys\n{imports}"], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("process", UNUSED)
def test_a_process_imports_no_library_that_it_does_not_use(process: str) -> None:
    code = f"import radixrt.{process}, sys; print({UNUSED[process]} & sys.modules.keys() or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def test_each_folder_of_the_package_is_a_row_of_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {path.partition("/")[0] for path in folders_of_the_docs().allowed} == folders


def test_only_entry_points_lie_at_the_top() -> None:
    assert {
        name for name in MODULES if name.count(".") < 2 and MODULES[name].name != "__init__.py"
    } <= ENTRY_POINTS


def test_each_folder_imports_only_what_the_architecture_allows() -> None:
    folders = folders_of_the_docs()
    trespasses = [
        f"{name} imports {module}"
        for name, file in MODULES.items()
        for module in imported_modules(file)
        if module in MODULES and not folders.lets(name, module)
    ]
    assert not trespasses


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_no_process_imports_another(process: str) -> None:
    """Whatever the table says."""
    assert not PROCESSES & folders_of_the_docs().allowed[process]


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_the_language_needs_no_such_package(package: str) -> None:
    for file in (PACKAGE / "lang").rglob("*.py"):
        assert package not in {module.split(".")[0] for module in imported_modules(file)}, file


def test_kernels_import_nothing_of_the_engine() -> None:
    for file in (PACKAGE.parent / "radixrt_kernels").rglob("*.py"):
        assert "radixrt" not in {module.split(".")[0] for module in imported_modules(file)}, file


def test_only_folders_that_compute_call_kernels() -> None:
    for name, file in MODULES.items():
        if any(module.startswith("radixrt_kernels") for module in imported_modules(file)):
            assert folders_of_the_docs().folder_of(name) in (
                "attention",
                "cli/doctor",
                "layers",
                "worker",
            ), name


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions count, and those for types: they hide a circle, they don't open
    it."""
    imports = {
        name: {module for module in imported_modules(file) if module in MODULES} - {name}
        for name, file in MODULES.items()
    }
    list(
        graphlib.TopologicalSorter(imports).static_order()
    )  # raises CycleError, which names the circle


def test_no_module_is_described_by_a_question() -> None:
    """The first line of a docstring states what the module is or does."""
    asking = []
    for folder in ("radixrt", "radixrt_kernels", "bench", "examples", "tests", "tools"):
        for file in (PACKAGE.parent / folder).rglob("*.py"):
            first = re.match(r'(?:#.*\n)*\s*r?"""(.*)', file.read_text())
            asking += [f"{file}: {first[1]}"] if first and "?" in first[1] else []
    assert not asking


def test_files_that_share_a_server_exist() -> None:
    assert [file for file in SHARED if not (PACKAGE.parent / file).exists()] == []


def test_nothing_is_unpickled_and_no_shell_is_started() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert not {"pickle", "marshal", "shelve", "dill"} & set(imported_modules(file)), file
        assert "shell=True" not in text and "recv_pyobj" not in text and "send_pyobj" not in text, (
            file
        )


class Folders(NamedTuple):
    """The table of docs/internals/architecture.md. A folder is named by its path below
    ``radixrt/``."""

    allowed: dict[str, set[str]]
    """Folders that each folder may import."""

    def folder_of(self, module: str) -> str:
        """The longest path of the table that leads to the module; "" for entry points at the
        top."""
        path = module.removeprefix("radixrt").strip(".").replace(".", "/")
        while path and path not in self.allowed:
            path = path.rpartition("/")[0]
        assert path or module in ENTRY_POINTS, (
            f"{module} is in no folder of docs/internals/architecture.md"
        )
        return path

    def lets(self, module: str, imported: str) -> bool:
        if imported == "radixrt" or imported.startswith(module + ".") or module in ENTRY_POINTS:
            return True  # the version; a package that hands on its modules' names; entry points
        own = self.folder_of(module)
        return self.folder_of(imported) in {own, *self.allowed[own]}


@cache
def folders_of_the_docs() -> Folders:
    text = (PACKAGE.parent / "docs" / "internals" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([a-z/]+)` \| [^|]* \| ([^|]*)\|$", text, re.M)
    allowed = {
        folder.strip("/"): {name for name in names.strip().split(", ") if name}
        for folder, names in rows
    }
    assert len(allowed) > 15
    assert set().union(*allowed.values()) <= allowed.keys()
    return Folders(allowed)


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_modules(file: Path) -> list[str]:
    """The modules that a file imports anywhere, for types too, and the names imported from them,
    which may be modules."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


MODULES = {module_name(file): file for file in PACKAGE.rglob("*.py")}
