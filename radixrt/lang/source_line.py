"""Which line of the user's program asked for something?"""

import linecache
import os
import sys
from dataclasses import dataclass

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the program, as a traceback would name it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    def as_traceback_line(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}' + (
            f"\n    {code}" if code else ""
        )


def caller() -> SourceLine:
    """The innermost line that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    code = frame.f_code
    return SourceLine(code.co_filename, frame.f_lineno, code.co_name)
