"""The folder in which radixrt keeps what it makes of checkpoints."""

import hashlib
import os
import shutil
from pathlib import Path

_DIGEST_BYTES = 32


def user_cache(name: str) -> Path:
    """``$XDG_CACHE_HOME/radixrt/NAME``, by default in ``~/.cache``; it may not exist yet.

    Raises:
        OSError: the user has no home folder.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OSError("there is no home folder, and XDG_CACHE_HOME is not set") from error
    return cache / "radixrt" / name


def drop_oldest(cache: Path, limit: int) -> None:
    """Leave at most this number of files and folders in a folder of the cache, the last that were
    made.

    Raises:
        OSError: the folder cannot be read, or a file not removed.
    """
    oldest_first = sorted(cache.iterdir(), key=lambda entry: entry.stat().st_mtime)
    for entry in oldest_first[:-limit]:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def sealed(content: bytes) -> bytes:
    """The content of a file whose damage :func:`unsealed` notices: a crash may leave zeros in
    it."""
    return hashlib.sha256(content).digest() + content


def unsealed(file: bytes) -> bytes:
    """Raises ValueError if the file is damaged."""
    content = file[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != file[:_DIGEST_BYTES]:
        raise ValueError("The file is damaged.")
    return content
