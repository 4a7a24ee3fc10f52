"""Reads the fields of JSON objects that users give.

Each function raises ``RequestError`` if the value is another than it returns; the error names the
place.
"""

import re
from collections.abc import Iterator
from typing import Any

from radixrt.base.errors import wrong

Object = dict[str, Any]


def as_object(value: Any, where: str) -> Object:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise wrong(where, "must be a list with at least one entry")
    return value


def entries(given: Object, name: str, where: str) -> Iterator[tuple[Any, str]]:
    """The entries of a list that is not empty, each with its place."""
    for index, entry in enumerate(as_list(given.get(name), f"{where}.{name}")):
        yield entry, f"{where}.{name}[{index}]"


def as_texts(value: Any, where: str) -> tuple[str, ...]:
    """Strings, none of them empty, without repetitions."""
    texts = as_list(value, where)
    if not all(isinstance(text, str) and text for text in texts):
        raise wrong(where, "must hold strings, none of them empty")
    return tuple(dict.fromkeys(texts))


def text(given: Object, name: str, where: str, may_be_empty: bool = False) -> str:
    text = given.get(name)
    if not isinstance(text, str) or not (text or may_be_empty):
        filled = "" if may_be_empty else " and not be empty"
        raise wrong(f"{where}.{name}", f"must be a string{filled}")
    return text


def flag(given: Object, name: str, where: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong(f"{where}.{name}", "must be a boolean")
    return value


def refuse_others(given: Object, known: set[str], where: str) -> None:
    """Refuse unknown keys: they would have to be ignored."""
    for name in given.keys() - known:
        shown = name if re.fullmatch(r"\w{1,50}", name) else repr(name[:50])
        raise wrong(f"{where}.{shown}", "is not supported; leave it out")
