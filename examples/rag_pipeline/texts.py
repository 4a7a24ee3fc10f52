"""Real text for retrieval: the documentation that comes with Python and its packages, cut into
passages."""

import importlib.metadata
import pydoc_data.topics
import re
from collections.abc import Iterator

from books import Passage

MAX_CHARACTERS = 700
"""Of a passage; some 170 tokens."""
MIN_CHARACTERS = 120


def documents() -> Iterator[tuple[str, str]]:
    """Names and texts: the topics of Python's ``help()``, and the descriptions and text files of
    the installed packages."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield f"python-{name.lower()}", text
    seen = set()
    for package in sorted(importlib.metadata.distributions(), key=lambda one: one.name.lower()):
        name = package.name.lower()
        if name in seen:
            continue
        seen.add(name)
        files = [file.locate() for file in package.files or () if file.suffix in (".md", ".rst")]
        texts = [file.read_text(errors="replace") for file in files if file.is_file()]
        yield name, "\n\n".join([package.metadata.get_payload(), *texts])


def passages(most: int) -> list[Passage]:
    """The first passages of each document in turn, so that a small number has many subjects."""
    queues = [iter(cut(name, text)) for name, text in documents()]
    found: list[Passage] = []
    while queues and len(found) < most:
        queues = [queue for queue in queues if (one := next(queue, None)) and not found.append(one)]
    return found[:most]


def cut(name: str, text: str) -> Iterator[Passage]:
    """Whole paragraphs together, as many as fit; longer ones are cut between words."""
    pieces = [
        piece.strip()
        for paragraph in re.split(r"\n\s*\n", text)
        for piece in re.findall(rf"(?s).{{1,{MAX_CHARACTERS}}}(?:\s|$)", paragraph + " ")
    ]
    together, number = "", 0
    for piece in [*pieces, ""]:
        if piece and len(together) + len(piece) + 2 <= MAX_CHARACTERS:
            together = f"{together}\n\n{piece}".strip()
            continue
        if len(together) >= MIN_CHARACTERS:
            number += 1
            yield Passage(f"{name}-{number}", together)
        together = piece
