"""The folder in which radixrt keeps what it makes of checkpoints."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """``$XDG_CACHE_HOME/radixrt/NAME``, by default in ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixrt" / name
