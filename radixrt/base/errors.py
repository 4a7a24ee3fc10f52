"""The exceptions that radixrt raises on purpose. Each message names the necessary change."""

import reprlib
from typing import Any


class RadixrtError(Exception):
    """Base of every error that radixrt raises on purpose."""


class ConfigError(RadixrtError):
    """The engine cannot start because of a setting, a checkpoint or the machine; the message names
    the necessary change."""


class NotCachedError(ConfigError):
    """A model of the hub is not on this machine, and was not to be downloaded."""


class RequestError(RadixrtError):
    """A request that cannot be served, with the HTTP status and OpenAI-style detail it maps to.

    Attributes:
        message: one sentence that names the necessary change.
        status: HTTP status code (400, 404, 413, 429, 503, ...).
        param: the request field at fault, if one is.
        code: OpenAI's machine-readable error code, if one fits (``context_length_exceeded``, ...).
        retry_after_s: seconds after which a retry is worthwhile, for 429 and 503.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def wrong(where: str, problem: str) -> RequestError:
    """The error of a field of a request.

    >>> str(wrong("tools[0].name", "must be a string"))
    'tools[0].name must be a string.'
    """
    return RequestError(f"{where} {problem}.", param=where)


def shown(value: Any) -> str:
    """A value from a client in a message: short, and in short time for values of any size.

    >>> len(shown("a" * 1_000_000)) < 100
    True
    """
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def unexpected_error() -> RequestError:
    """The error for clients after an unexpected exception, which the caller has logged."""
    return RequestError("The server failed at this request; its log says more.", status=500)


class EngineDiedError(RadixrtError):
    """A process of the engine has ended; its open requests are lost."""
