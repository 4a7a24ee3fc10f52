"""Reads the images of messages: data URLs and https addresses, which are decoded and, if they are
allowed, fetched in the tokenizer process; and files of this program."""

import base64
import re
from pathlib import Path
from typing import Any

from radixrt.base.errors import RequestError, shown

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of content parts that hold an image: OpenAI's of chats and of responses, and
Anthropic's."""

MAX_URL_CHARS = 2048
"""Characters of an address."""
MAX_IMAGE_CHARS = 28 << 20
"""Characters of one image in base64: 20 MiB decoded."""

IDLE_IMAGE_BYTES = 512 << 20
"""Memory of the features of images without users that stay for the next requests."""
KEPT_IMAGE_BYTES = 128 << 20
"""Memory of the tensors of the last images in the tokenizer process, for their next turns."""
PREPARER_BYTES = 160 << 20
"""Memory of the process that prepares images, but for the pixels of one."""
BYTES_OF_A_PIXEL = 64
"""Memory in which a pixel is decoded and prepared there (measured: 64 at most, with Qwen3-VL's
processor)."""

_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]*/?[\w.+*-]*)(?:;[\w.+=-]+)*;base64,", re.ASCII)


def image_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """The part as prompts have it: ``{"type": "image", "data": base64}``, or ``"url"`` in the place of
    ``"data"`` with an https address.

    Args:
        where: the part's place in the request, for errors.

    Raises:
        RequestError: it holds neither, or no data URL that can be an image.
    """
    if part.get("type") == "image":
        if "data" in part:  # a translator has read it
            return {"type": "image", "data": image_base64(part["data"], f"{where}.data")}
        return _of_source(part.get("source"), f"{where}.source")
    where, url = f"{where}.image_url", part.get("image_url")
    if isinstance(url, dict):
        where, url = f"{where}.url", url.get("url")
    return _of_url(url, where)


def data_url(file: str | Path | bytes) -> str:
    """The data URL of an image: of a file's name, or of its content. The server finds its format.

    >>> data_url(b"GIF89a")
    'data:image/*;base64,R0lGODlh'

    Raises:
        OSError: the file can't be read.
    """
    content = file if isinstance(file, bytes) else Path(file).expanduser().read_bytes()
    return f"data:image/*;base64,{base64.b64encode(content).decode()}"


def _of_source(source: Any, where: str) -> dict[str, Any]:
    """The part of Anthropic's ``source``."""
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise _refusal(f'{where} must be {{"type": "base64", "media_type": …, "data": …}}.', where)
    if source["type"] == "url":
        return _of_url(source.get("url"), f"{where}.url")
    _check_kind(str(source.get("media_type")), where)
    return {"type": "image", "data": image_base64(source.get("data"), f"{where}.data")}


def _of_url(url: Any, where: str) -> dict[str, Any]:
    if not isinstance(url, str):
        raise _refusal(f"{where} must be a string with a data URL, data:image/png;base64,….", where)
    if url[:8].lower() == "https://" and len(url) <= MAX_URL_CHARS:
        return {"type": "image", "url": url}
    found = _DATA_URL.match(url[:256])
    if found is None:
        raise _refusal(
            f"{where} must be a data URL, data:image/png;base64,…, not {shown(url[:60])}: this server fetches no images but by https.",
            where,
        )
    _check_kind(found["kind"], where)
    return {"type": "image", "data": image_base64(url[found.end() :], where)}


def image_base64(data: Any, where: str) -> str:
    """A file in base64.

    Raises:
        RequestError: it is no string, empty or too long.
    """
    if not isinstance(data, str) or not data:
        raise _refusal(f"{where} must be a string with an image in base64.", where)
    if len(data) > MAX_IMAGE_CHARS:
        raise _refusal(
            f"{where} has {len(data)} characters; an image may have {MAX_IMAGE_CHARS} in base64. Scale it down.",
            where,
            status=413,
        )
    return data


def _check_kind(kind: str, where: str) -> None:
    if "svg" in kind.lower():
        raise _refusal(f"{where}: SVG is not decoded; send a PNG of it.", where)


def _refusal(message: str, where: str, status: int = 400) -> RequestError:
    return RequestError(message, status=status, param=where, code="invalid_image")
