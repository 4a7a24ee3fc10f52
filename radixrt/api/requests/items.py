"""Reads the untyped items of other APIs' requests."""

import logging
from collections.abc import Callable
from typing import Any

from radixrt.base.errors import RequestError

log = logging.getLogger(__name__)

_MAX_WARNINGS = 100
_LONGEST_KIND = 80
"""Characters."""

_skipped: set[tuple[str, str]] = set()
"""What the log has named."""


def string_in(item: dict[str, Any], name: str, where: str) -> str:
    """The field ``name`` of an item.

    Args:
        where: the item's place in the request, for errors.

    Raises:
        RequestError: it is missing, or no string; names it.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def text_parts(
    content: Any,
    where: str,
    read: Callable[[Any, str], dict[str, Any]],
    name: str = "content parts",
    first: int = 0,
) -> list[dict[str, Any]]:
    """Text parts of a chat message, from a text or a list.

    Args:
        where: the content's place in the request, for errors.
        read: the text part of one element at a place.
        name: of the elements.
        first: index of the first element in the request.

    Raises:
        RequestError: it is neither, or ``read`` refuses an element.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of {name}.", param=where)
    return [read(part, f"{where}[{first + index}]") for index, part in enumerate(content)]


def warn_of_skipped(what: str, kind: object) -> None:
    """Log once that items of this type are skipped.

    Args:
        what: plural of such items, as "tools".
    """
    skipped = what, str(kind)[:_LONGEST_KIND]
    if skipped not in _skipped and len(_skipped) < _MAX_WARNINGS:
        _skipped.add(skipped)
        log.warning("Skipped %s of the type %r, which this server does not have.", *skipped)
