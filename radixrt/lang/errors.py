"""Errors of programs. Each names the line of the program that it belongs to."""

import linecache
import os
import sys
from dataclasses import dataclass
from typing import Any

from radixrt.base.errors import RadixrtError

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's program, as a traceback names it."""

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
    """The innermost line of the stack that is not in this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    code = frame.f_code
    return SourceLine(code.co_filename, frame.f_lineno, code.co_name)


class LangError(RadixrtError):
    """Base of what :mod:`radixrt.lang` raises.

    Attributes:
        message: the problem, and what to change.
        source: the line of the program, once it is known.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.source: SourceLine | None = None

    def __str__(self) -> str:
        return self.message if self.source is None else f"{self.message} [{self.source}]"


class ProgramError(LangError):
    """The program asks for something invalid; it must be changed."""


class UnknownVariable(ProgramError, KeyError):
    """The state has no variable of that name."""


class AnswerError(LangError):
    """An answer can't be read as the type that was asked for.

    Attributes:
        text: the answer.
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Cancelled(LangError):
    """The value was not computed, because its program or branch was cancelled."""


class BackendError(LangError):
    """The backend failed to answer a call, or refused it."""


class ConnectionLost(BackendError):
    """The server cannot be reached, or closed the connection."""


class BadRequest(BackendError):
    """The server refused a call.

    Attributes:
        status: the HTTP status; 400 from an engine in this process.
        param: the invalid field, where the server names it.
        code: the server's name of the error, where it has one.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ServerFailed(BackendError):
    """The server failed, or is overloaded (status 5xx or 429).

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedFeature(BackendError):
    """The backend has no such feature.

    Attributes:
        feature: the missing feature.
        backend: the backend's name.
    """

    def __init__(self, feature: str, backend: str, instead: str = "") -> None:
        advice = f" {instead}" if instead else ""
        super().__init__(f"{backend} does not offer {feature}.{advice}")
        self.feature = feature
        self.backend = backend


def locate(error: BaseException, source: SourceLine, what: str) -> None:
    """Add the line of the program to an error; an error that has one keeps it."""
    if isinstance(error, LangError):
        if error.source is not None:
            return
        error.source = source
    error.add_note(f"In the program, {what}:\n{source.as_traceback_line()}")


def unreadable(text: str, wanted: Any, reason: object, cut_off: bool) -> AnswerError:
    """The error for an answer that is not of the wanted type."""
    if cut_off:
        advice = "It was cut off by max_tokens: raise it."
    else:
        advice = "Give gen a schema or type that the backend enforces, or leave the type out."
    return AnswerError(
        f"The answer {text[:200]!r} can't be read as {wanted}: {reason}. {advice}", text
    )
