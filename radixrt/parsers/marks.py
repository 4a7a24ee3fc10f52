"""Reads the marks of a checkpoint by which its formats are recognised: the chat template and the
added tokens."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelMarks:
    template: str
    """The text of the chat template, of all of them if there are several; "" without one."""
    folder: Path
    """The folder of tokenizer.json."""

    @functools.cached_property
    def tokens(self) -> frozenset[str]:
        """The texts of the tokens that were added to the vocabulary, such as control tokens.
        tokenizer.json, of many megabytes, is read for them when they are first needed.

        Raises:
            ConfigError: the file can't be read.
        """
        file = self.folder / "tokenizer.json"
        with _config_errors(self.folder):
            added = _read(file).added_tokens if file.is_file() else []
        return frozenset(token.content for token in added)

    def in_template(self, *marks: str) -> bool:
        """Whether all of these texts stand in the template. Quotes in it may be escaped."""
        return all(mark in self.template for mark in marks)

    @staticmethod
    def from_checkpoint(folder: Path, template_file: str | None = None) -> "ModelMarks":
        """The marks of the tokenizer in a folder.

        Args:
            template_file: used instead of the tokenizer's own template.

        Raises:
            ConfigError: a file can't be read.
        """
        with _config_errors(folder):
            if template_file is not None:
                template = Path(template_file).read_text(encoding="utf-8")
            else:
                template = _own_template(folder)
        return ModelMarks(template.replace('\\"', '"'), folder)


@contextlib.contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"Can't read the chat template and the added tokens of {folder}: {error}"
        ) from error


class _AddedToken(msgspec.Struct):
    content: str = ""


class _File(msgspec.Struct):
    """The parts of tokenizer_config.json and of tokenizer.json that are read."""

    chat_template: Any = None
    added_tokens: list[_AddedToken] = []


def _read(file: Path) -> _File:
    return msgspec.json.decode(file.read_bytes(), type=_File)


def _own_template(folder: Path) -> str:
    """The template where transformers looks for it: files of their own come before the tokenizer's
    settings."""
    files = [
        folder / "chat_template.jinja",
        *sorted(folder.glob("additional_chat_templates/*.jinja")),
    ]
    if texts := [file.read_text(encoding="utf-8") for file in files if file.is_file()]:
        return "\n".join(texts)
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = folder / name
        found = _read(file).chat_template if file.is_file() else None
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # [{"name": "default", "template": ...}, ...]
            return "\n".join(
                str(each.get("template", "")) for each in found if isinstance(each, dict)
            )
    return ""
