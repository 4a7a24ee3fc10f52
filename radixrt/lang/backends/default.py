"""Which backend answers when a program names none? The one that was set, or the server at RADIXRT_URL."""

import os

from radixrt.lang.backends.protocol import Backend
from radixrt.lang.backends.server import DEFAULT_URL, Server

URL_VARIABLE = "RADIXRT_URL"

_default: Backend | None = None


def set_default_backend(backend: Backend | str | None) -> None:
    """What answers all programs that name no backend; the address of a radixrt server will do. None: none is set."""
    global _default
    _default = None if backend is None else backend_of(backend)


def default_backend() -> Backend:
    """The one that was set; else the server at RADIXRT_URL, or at the default address."""
    global _default
    if _default is None:
        _default = Server(os.environ.get(URL_VARIABLE, DEFAULT_URL))
    return _default


def backend_of(given: Backend | str) -> Backend:
    """A backend, or the radixrt server at an address."""
    return Server(given) if isinstance(given, str) else given
