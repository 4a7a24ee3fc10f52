"""Serves the files of the web page: HTML at ``/``, scripts and styles below ``/page/``.

The files lie in the package and refer to nothing outside of the server. The Content-Security-Policy
lets a browser load nothing else, run no script or style within the HTML, and make no HTML of text
(``trusted-types``), so a text of a model or of another client is never more than text.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from radixrt.api.http.browsers import PAGE_FILES
from radixrt.base.errors import RequestError

FOLDER = Path(__file__).parent / "static"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""``no-cache``: a browser asks whether its copy is current, so a new version is seen at once."""

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str

    @staticmethod
    def read(file: Path) -> "_File":
        content = file.read_bytes()
        etag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
        return _File(content, MEDIA_TYPES[file.suffix], etag)


_FILES = {file.name: _File.read(file) for file in FOLDER.iterdir()}

routes = APIRouter()


@routes.get(PAGE_FILES + "{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    return response(request, name)


def response(request: Request, name: str) -> Response:
    """A file, or that the browser's copy is current.

    Raises:
        RequestError: there is no such file.
    """
    file = _FILES.get(name)
    if file is None:
        raise RequestError("There is no such file of the page.", status=404)
    headers = HEADERS | {"etag": file.etag}
    if name == "index.html":
        headers["vary"] = "accept"
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
