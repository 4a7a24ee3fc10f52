"""How does a trace become a page? One HTML file with its style, its script and its data inside, and no way out.

Nothing that a model or a user wrote is ever part of the markup: it stands in the data, and the script sets it as text. And
should a mistake creep in, the page's own policy lets no script run but the one that is named by its hash.
"""

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template
from typing import Any

from radixrt.lang.tracing.text import summary

FRAME_HEIGHT = 560
"""Pixels, in a notebook."""


def page_of(data: dict[str, Any]) -> str:
    script, style = _part("page.js"), _part("page.css")
    return Template(_part("page.html")).substitute(
        title=html.escape(data["title"]),
        summary=html.escape(summary(data)),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        data=_as_inert_json(data),
    )


def frame_of(data: dict[str, Any]) -> str:
    page = html.escape(page_of(data))
    return (
        f'<iframe sandbox="allow-scripts" title="{html.escape(data["title"])}" srcdoc="{page}" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
    )


def _as_inert_json(data: dict[str, Any]) -> str:
    """JSON in which no character can end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"))  # in ASCII, so lone surrogates do no harm
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _part(name: str) -> str:
    return files("radixrt.lang.tracing").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As content security policies name what may stand inline."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
