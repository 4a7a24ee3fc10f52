"""Every public name of radixrt is on a page.

Fields and endpoints of the HTTP API, and metrics, are checked in ``tests/api/test_docs.py``.
"""

import argparse
import inspect
import re
from dataclasses import fields
from types import ModuleType

import pytest

import radixrt
import radixrt.lang as rl
from radixrt.base.config import ServerConfig
from radixrt.base.settings.setting import flag_of
from radixrt.base.settings.translation import PEER_NAMES, key_of
from radixrt.cli.main import _parser
from tests.docs.pages import PAGES, ROOT, code_of, names_in

HOME = {radixrt: ROOT / "docs/python.md", rl: ROOT / "docs/lang.md"}
FOR_BACKENDS = {"cache_tokens", "compute_ahead", "generate", "match_cache", "name", "score"}
"""The protocol between the language and what answers it: nothing that a program calls."""

EXPORTS = [(module, name) for module in HOME for name in module.__all__]


@pytest.mark.parametrize(
    ("module", "name"), EXPORTS, ids=lambda part: getattr(part, "__name__", part)
)
def test_every_export_is_told(module: ModuleType, name: str) -> None:
    """With each public member, where it is a class; on the module's own page."""
    told = names_in(HOME[module])
    exported = getattr(module, name)
    wanted = {name} | (public_members(exported) if inspect.isclass(exported) else set())
    if name in ("Engine", "OpenAI", "Server"):
        wanted -= FOR_BACKENDS
    assert not wanted - told, f"{HOME[module].name} does not tell {sorted(wanted - told)}"


def public_members(exported: type) -> set[str]:
    """Methods, properties and fields that radixrt's own classes give it."""
    own = [base for base in exported.__mro__ if base.__module__.startswith("radixrt")]
    members = {name: member for base in own for name, member in vars(base).items()}
    declared = {name for base in own for name in getattr(base, "__annotations__", {})}
    methods = {
        name for name, member in members.items()
        if inspect.isroutine(member) or isinstance(member, property | staticmethod | classmethod)
    }  # fmt: skip
    return {name for name in declared | methods if not name.startswith("_")}


def test_every_setting_is_told() -> None:
    page = (ROOT / "docs/server.md").read_text()
    assert not [
        flag for field in fields(ServerConfig) if f"`{(flag := flag_of(field.name))}`" not in page
    ]


def commands_of(parser: argparse.ArgumentParser, name: str) -> dict[str, argparse.ArgumentParser]:
    """The commands below it that do something, by their words."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return {name: parser}
    return {
        words: each
        for action in below
        for word, sub in action.choices.items()
        for words, each in commands_of(sub, f"{name} {word}").items()
    }


COMMANDS = commands_of(_parser(), "radixrt")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_told_with_its_flags(command: str) -> None:
    """The flags on a page that tells the command, in full and not as the beginning of another."""
    pages = [code_of(page) for page in PAGES]
    telling = " ".join(page for page in pages if command in page)
    assert telling, f"no page tells `{command}`"
    words = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", telling))
    flags = {flag for flag in COMMANDS[command]._option_string_actions if flag.startswith("--")}
    flags = {flag for flag in flags if key_of(flag) not in PEER_NAMES}  # tests/test_peers.py
    assert not flags - words - {"--help"}, f"{command}: {sorted(flags - words)}"
