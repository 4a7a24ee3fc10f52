"""The step that the compilation of a JSON schema is at, with the subschema: written by a helper,
read by its parent at the time limit."""

import mmap
import os
import tempfile
from typing import BinaryIO, Literal

_SIZE = 512

Step = Literal["", "rewrite", "search", "compile"]

_ADVICE: dict[str, str] = {
    "": "simplify the schema, pattern or grammar",
    "rewrite": "at {} it has too many alternatives that one value may combine; have fewer of anyOf, oneOf, allOf, if, not and "
    "dependentRequired there, or fewer branches",
    "search": "a part that no grammar enforces was searched, the last one at {}; simplify this subschema, oneOf, allOf and pattern "
    "above all",
    "compile": "its rewriting was done, and its grammar is too large; lower maxLength, maxItems and the repetitions in patterns, or "
    "have fewer properties and definitions",
}

_memory: mmap.mmap | bytearray = bytearray(_SIZE)


def shared() -> BinaryIO:
    """A file for :func:`share` in one process and :func:`advice` in another."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  (its user closes it)
    file.truncate(_SIZE)
    return file


def share(fd: int) -> None:
    """Let the process that holds the same file read the notes of this one."""
    global _memory
    _memory = mmap.mmap(fd, _SIZE)


def note(step: Step, pointer: str = "") -> None:
    """Say that a step begins at the subschema of a JSON pointer into the user's schema."""
    text = f"{step} {pointer}".encode()[: _SIZE - 1] + b"\0"
    _memory[: len(text)] = text


def advice(file: BinaryIO) -> str:
    """What to change, by the last note of the process that shares the file."""
    text = os.pread(file.fileno(), _SIZE, 0).partition(b"\0")[0].decode(errors="replace")
    step, _, pointer = text.partition(" ")
    return _ADVICE[step].format(repr(pointer) if pointer else "its root")
