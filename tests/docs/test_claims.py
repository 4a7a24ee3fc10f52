"""Files, tests, links, flags, commands, targets and environment variables that the pages name
exist."""

import argparse
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from radixrt.cli.config_flags import markdown_page
from radixrt.cli.main import _parser
from tests.docs.pages import OTHER_ENGINES, PAGES, ROOT, code, code_of, commands, repository, spans

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

WRITTEN_BY_COMMANDS = {"gpu-check/", "kernels/", "results.json", "results.md"}
NO_PATHS = {"llama.cpp", "structured_outputs.json"}
IN_CHECKPOINTS = {
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
}  # fmt: skip
NOT_THERE = WRITTEN_BY_COMMANDS | NO_PATHS | IN_CHECKPOINTS | {"radixrt/models/ministral.py"}
"""The last is written by the reader of docs/internals/add_a_model.md."""


def test_server_page_is_what_the_config_says() -> None:
    assert (ROOT / "docs/server.md").read_text() == markdown_page(), "run `make docs`"


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, fragment in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            anchors = {anchor(heading) for heading in headings}
            assert fragment in anchors, f"{page.name} links to {other.name}#{fragment}"


def looks_like_a_path(span: str) -> bool:
    is_file = re.fullmatch(r"[\w./-]+\.(py|cpp|hpp|json|md|toml|txt)", span)
    is_folder = re.fullmatch(r"[\w-]+(/[\w-]+)+/?|[\w-]+/", span)
    return bool(is_file or is_folder) and "FAMILY" not in span and not span.startswith("/")


@each_page
def test_files_and_folders_that_are_named_exist(page: Path) -> None:
    """As a path from the root, or as the end of one, as in ``scheduler/radix/node.py``; of a module
    also without ``.py``."""
    for span in spans(page):
        if looks_like_a_path(span) and span not in NOT_THERE:
            assert {span.rstrip("/"), f"{span}.py"} & ends_of_paths(), f"{page.name} names {span}"


@cache
def ends_of_paths() -> set[str]:
    """Each path of the repository, and what is left of it without its first folders."""
    return {
        "/".join(parts[begin:])
        for parts in (path.split("/") for path in repository())
        for begin in range(len(parts))
    }


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    """As ``file.py::test_name``, or as the name alone."""
    for span in spans(page):
        if (named := re.fullmatch(r"([\w/]+\.py::)?(test_\w+)", span)) is None:
            continue
        end = (named[1] or "").removesuffix("::")
        files = [path for path in repository() if path.startswith("tests/") and path.endswith(end)]
        sources = ((ROOT / path).read_text() for path in files if path.endswith(".py"))
        assert any(f"def {named[2]}(" in source for source in sources), f"{page.name} names {span}"


@each_page
def test_every_page_is_named_in_the_index(page: Path) -> None:
    """That of its folder; guides are in the index of the documentation."""
    place = page.relative_to(ROOT)
    if place.parts[0] != "docs" or page.name == "README.md":
        return
    index = ROOT / ("docs/internals" if "internals" in place.parts else "docs") / "README.md"
    link = page.relative_to(index.parent).as_posix()
    assert f"({link}" in index.read_text(), f"add {place} to {index.relative_to(ROOT)}"


@each_page
def test_flags_that_are_named_are_declared(page: Path) -> None:
    """Somewhere in the repository; those of ``radixrt`` commands are held to their parser below."""
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code_of(page)):
        assert flag in declared_flags(), f"{page.name} names {flag}"


@cache
def declared_flags() -> set[str]:
    declared = set(re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", code()))
    options = (parser._option_string_actions for parser in parsers(radixrt_parser()))
    return declared.union(*options)


@cache
def radixrt_parser() -> argparse.ArgumentParser:
    """That of the ``radixrt`` command, which takes long to make."""
    return _parser()


def test_what_other_engines_have_is_named_as_it_is_here() -> None:
    """The flags are those of ``radixrt serve``; the endpoints are on the page of endpoints."""
    [serve] = [parser for parser in parsers(radixrt_parser()) if parser.prog == "radixrt serve"]
    code = "\n".join(map(code_of, OTHER_ENGINES))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code))
    assert len(flags) > 40
    assert not flags - set(serve._option_string_actions)
    endpoints = set(re.findall(r"^/[a-z_/0-9]+$", code, re.MULTILINE))
    assert len(endpoints) > 3
    page = (ROOT / "docs/api.md").read_text()
    assert not [endpoint for endpoint in endpoints if f"{endpoint}`" not in page]


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """It, and those of its subcommands."""
    below = [
        action.choices.values() for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]  # fmt: skip
    return [parser, *(deep for choices in below for each in choices for deep in parsers(each))]


def plain(command: str) -> list[str]:
    """The words of a command without what stands in it for the reader: ``[…]`` is optional, ``a|b``
    a choice."""
    command = re.sub(r"\[[^]]*\]", "", command)
    command = re.sub(r"(\w)(\|\w+)+", r"\1", command.replace(" ...", "").replace("…", "..."))
    return shlex.split(command)


@each_page
def test_radixrt_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        program, *words = plain(command)
        if program != "radixrt":
            continue
        try:
            radixrt_parser().parse_args(words)
        except SystemExit as exit:
            # What is named without the file that it wants is no command, but has to be one's
            # beginning.
            error = capsys.readouterr().err
            assert exit.code == 0 or "the following arguments are required" in error, (
                f"{command}: {error}"
            )


@each_page
def test_python_commands_name_what_is_there(page: Path) -> None:
    for command in commands(page):
        program, *words = plain(command)
        if program not in ("python", "python3", "pytest") or not words:
            continue
        flags = [word for word in words if word.startswith("--")]
        if words[:2] == ["-m", "pytest"] or program == "pytest":
            for path in (word for word in words if word.startswith("tests")):
                assert path in repository(), command
            continue
        script = (
            source_of_module(words[1]) if words[0] == "-m" else source_of_script(page, words[0])
        )
        for flag in flags:
            assert f'"{flag}"' in script, f"{page.name}: {command}: no {flag}"


def source_of_module(name: str) -> str:
    """Of a package, all of it: the flags may be declared in any of its files."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"there is no module {name}"
    origin = Path(spec.origin)
    files = origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
    source = "\n".join(file.read_text() for file in files)
    if name == "radixrt.launch_server":  # takes the flags of `radixrt serve`
        return source + " ".join(f'"{flag}"' for each in parsers(radixrt_parser()) for flag in each._option_string_actions)  # fmt: skip
    return source


def source_of_script(page: Path, name: str) -> str:
    found = [folder / name for folder in (ROOT, page.parent) if (folder / name).is_file()]
    assert found, f"{page.name} runs {name}"
    return found[0].read_text()


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        program, *words = plain(command)
        if program == "make":
            assert words[0] in targets or "=" in words[0], command


@each_page
def test_environment_variables_that_are_named_are_read(page: Path) -> None:
    for name in re.findall(r"\bRADIXRT_[A-Z_]+", code_of(page)):
        if name != "RADIXRT_ISA":  # a namespace of the kernels
            assert name in code(), f"{page.name} names {name}"


def test_environment_variables_that_are_read_are_named() -> None:
    read = {
        name
        for path in repository()
        if path.endswith(".py") and not path.startswith("tests/")
        for name in re.findall(
            r"environ(?:\.get\(|\[)\s*\"(RADIXRT_\w+)", (ROOT / path).read_text()
        )
    }
    assert read
    text = "\n".join(page.read_text() for page in PAGES)
    assert not {name for name in read if name not in text}
