"""One finding about the machine, with the advice that belongs to it."""

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    subject: str
    """The thing that was checked, such as ``kernels``."""
    level: Literal["ok", "warning", "error"]
    """error: a server does not start here; warning: it runs worse than it could."""
    fact: str
    """One line."""
    advice: str = ""
    """The next step; empty where there is nothing to do."""
