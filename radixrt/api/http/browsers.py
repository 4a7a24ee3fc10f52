"""Refuses requests that a web page makes without permission, and requests to host names that are
not the server's.

A browser sends requests of any page to any address that it can reach, also to a server on its own
machine. Two attacks follow from that:

- Cross-site requests. A page can post a form or ``text/plain`` without asking the server first.
Browsers mark such requests
  with ``Origin`` or ``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/), so requests with
  either are checked.
- DNS rebinding. The name of a page's host is pointed at the server after the page has loaded. The
page then has the
  server's origin, and its GET requests carry no ``Origin``. They do carry the page's name as
  ``Host``, so each request's ``Host`` is checked. An address in place of a name is accepted: no DNS
  answer is involved.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from radixrt.base.errors import RequestError

log = logging.getLogger(__name__)

ANY = "*"
"""The name, or origin, that stands for all of them."""

PAGE_FILES = "/page/"
"""Beginning of the paths of the web page's files."""

MAX_LOGGED = 64
"""Names and origins of which a refusal is logged; clients choose them."""

_PLAIN = re.compile(r"[\w.:/\[\]-]+")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def accepted_names(host: str, allowed: Collection[str]) -> tuple[str, ...]:
    """The host names that requests may carry, besides IP addresses and names that end in
    ``.localhost``.

    Args:
        host: the address that the server listens on; a name is accepted.
        allowed: the names of ``--allowed-hosts``.
    """
    own = [] if _is_address(host) or not host else [host]
    names = ["localhost", socket.gethostname(), *own, *allowed]
    return tuple(dict.fromkeys(name.lower() for name in names))


def cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Let the pages of ``origins`` send any request and read the answers."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=[ANY],
        allow_private_network=True,
        expose_headers=["Retry-After", "X-Request-Id"],
    )


class BrowserRules:
    """Refuses unknown host names with 421, pages of other origins with 403, and a page's body that
    is not JSON with 415.

    Args:
        names: of :func:`accepted_names`.
        origins: whose pages may use the server, besides its own.
    """

    def __init__(self, names: Collection[str], origins: Collection[str]) -> None:
        self._names = frozenset(names)
        self._origins = frozenset(origins)
        self._logged: set[str] = set()

    def check(self, method: str, headers: Headers) -> None:
        """Raises RequestError if the request is refused."""
        for host in headers.getlist("host"):
            if not self._accepts(host):
                self._log_once(
                    _name(host)[:200],
                    "A request to the host name %r was refused; --allowed-hosts %s lets such requests pass.",
                )
                raise RequestError(
                    f"This server is not called {_name(host)!r:.200}. Use its IP address, or start it with "
                    "--allowed-hosts NAME.",
                    status=421,
                    code="host_not_allowed",
                )
        if "origin" not in headers and "sec-fetch-site" not in headers:
            return  # not a browser
        if not self._may_come(method, headers):
            origin = headers.get("origin", "another site")[:200]
            self._log_once(
                origin,
                "A page of %r was refused; --cors-origins %s lets such pages use the server. Browsers only say 'Failed to fetch'.",
            )
            raise RequestError(
                f"Pages of {origin!r:.200} may not use this server; start it with --cors-origins ORIGIN to let them.",
                status=403,
                code="origin_not_allowed",
            )
        if method not in _SAFE_METHODS and not _is_json(headers.get("content-type", "")):
            raise RequestError(
                "A request of a web page needs the header 'Content-Type: application/json'.",
                status=415,
                code="json_required",
            )

    def _log_once(self, name: str, warning: str) -> None:
        """Log what a browser does not show to its user, for each of a bounded number of names."""
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning(warning, name, name if _PLAIN.fullmatch(name) else "NAME")

    def _accepts(self, host: str) -> bool:
        name = _name(host)
        return (
            name in self._names
            or ANY in self._names
            or name.endswith(".localhost")
            or _is_address(name)
        )

    def _may_come(self, method: str, headers: Headers) -> bool:
        if ANY in self._origins:
            return True
        origin = headers.get("origin")
        if origin is not None:
            own = origin.lower().partition("://")[2]
            return origin in self._origins or (own != "" and own == headers.get("host", "").lower())
        if headers["sec-fetch-site"] in ("same-origin", "none"):
            return True
        # A link to the server, whose answer no page can read.
        is_link = headers.get("sec-fetch-mode") == "navigate"
        return is_link and headers.get("sec-fetch-dest") == "document" and method in _SAFE_METHODS


def asks_for_page(scope: Scope) -> bool:
    """Whether a request is for the web page, or for one of its files, which hold no secret."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    return path.startswith(PAGE_FILES) or (path == "/" and accepts_html(Headers(scope=scope)))


def accepts_html(headers: Headers) -> bool:
    """Whether the client names HTML among the types that it takes, as browsers do where a page is
    opened."""
    return "text/html" in headers.get("accept", "")


def is_terminal(headers: Headers) -> bool:
    """Whether a person asks from a terminal: by a program for that, without naming a type."""
    agent = headers.get("user-agent", "").lower()
    return agent.startswith(("curl/", "wget/")) and headers.get("accept", "*/*") == "*/*"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _name(host: str) -> str:
    """The name or address in a ``Host`` header.

    >>> _name("Example.com:30000"), _name("[::1]:30000")
    ('example.com', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
