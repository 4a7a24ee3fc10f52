"""Reads the untyped items of other APIs' requests."""

import logging
from typing import Any

from radixrt.base.errors import RequestError

log = logging.getLogger(__name__)

_MOST_WARNINGS = 100
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


def warn_of_skipped(what: str, kind: object) -> None:
    """Log once that items of this type are skipped.

    Args:
        what: plural of such items, as "tools".
    """
    skipped = what, str(kind)[:_LONGEST_KIND]
    if skipped not in _skipped and len(_skipped) < _MOST_WARNINGS:
        _skipped.add(skipped)
        log.warning("Skipped %s of the type %r, which this server does not have.", *skipped)
