"""What can go wrong in a program, and who must act? Each error names the line of the program it belongs to."""

from typing import Any

from radixrt.base.errors import RadixrtError
from radixrt.lang.source_line import SourceLine


class LangError(RadixrtError):
    """Base of what :mod:`radixrt.lang` raises.

    Attributes:
        message: what is wrong, and what to change.
        source: the line of the program it belongs to, once that is known.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.source: SourceLine | None = None

    def __str__(self) -> str:
        return self.message if self.source is None else f"{self.message} [{self.source}]"


class ProgramError(LangError):
    """The program asks for what can't be meant; it has to be written differently."""


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
    """The value was not computed, since its program or branch was cancelled."""


class BackendError(LangError):
    """What answers the program's calls could not, or would not."""


class ConnectionLost(BackendError):
    """No server is there, or it went away."""


class BadRequest(BackendError):
    """The server refused a call.

    Attributes:
        status: the HTTP status; 400 from an engine in this process.
        param: the field at fault, where the server says so.
        code: a name for what is wrong, where it has one.
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
    """The server met a fault of its own, or is overloaded (status 5xx, or 429).

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedFeature(BackendError):
    """The backend has no such feature.

    Attributes:
        feature: what it lacks.
        backend: its name.
    """

    def __init__(self, feature: str, backend: str, instead: str = "") -> None:
        advice = f" {instead}" if instead else ""
        super().__init__(f"{backend} does not offer {feature}.{advice}")
        self.feature = feature
        self.backend = backend


def locate(error: BaseException, source: SourceLine, what: str) -> None:
    """Say in an error which line of the program it belongs to; the first such line stays."""
    if isinstance(error, LangError):
        if error.source is not None:
            return
        error.source = source
    error.add_note(f"In the program, {what}:\n{source.as_traceback_line()}")


def unreadable(text: str, wanted: Any, reason: object, cut_off: bool) -> AnswerError:
    """The error of an answer that is not of the wanted type."""
    if cut_off:
        advice = "It was cut off by max_tokens: raise it."
    else:
        advice = "Give gen a schema or type that the backend enforces, or leave the type out."
    return AnswerError(
        f"The answer {text[:200]!r} can't be read as {wanted}: {reason}. {advice}", text
    )
