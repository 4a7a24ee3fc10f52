"""Finds the pages of the documentation, and the claims that the form of their text shows."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
OTHER_ENGINES = (ROOT / "docs/guides/coming_from.md", ROOT / "docs/internals/peer_flags.md")
"""Their tables name flags and endpoints of other engines in the first column."""
FOLDERS = ("radixrt", "radixrt_kernels", "bench", "tools", "examples", "tests", "deploy", "docs")
"""Of the repository's files."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def repository() -> frozenset[str]:
    """The paths of all files and folders, relative to the root."""
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return frozenset(
        path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*"), *below)
        if "__pycache__" not in path.parts
    )  # fmt: skip


@cache
def code() -> str:
    """All Python of the repository but its tests, the Makefile and what builds the kernels."""
    sources = [path for path in repository() if path.endswith((".py", ".txt", ".cpp", ".hpp"))]
    own = [path for path in sources if not path.startswith("tests/docs/")]
    return "\n".join((ROOT / path).read_text() for path in ["Makefile", *sorted(own)])


@cache
def text_of(page: Path) -> str:
    """All that the page says of radixrt."""
    text = page.read_text()
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if page in OTHER_ENGINES else text


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks in these languages, in order."""
    return [text for language, text in _BLOCK.findall(text_of(page)) if language in languages]


def spans(page: Path) -> list[str]:
    """What stands between backticks in the running text."""
    prose = _BLOCK.sub("", text_of(page))
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def indented(page: Path) -> list[str]:
    """The lines of blocks that are told by their indentation; continued ones as one."""
    prose = _BLOCK.sub("", text_of(page)).replace("\\\n", " ")
    return re.findall(r"^ {4}(\S.*)", prose, re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Lines that are to be typed into a shell, without their comments."""
    shell = "\n".join(blocks(page, "bash", "")).replace("\\\n", " ")
    lines = [*shell.splitlines(), *indented(page), *spans(page)]
    bare = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
    return [line for line in bare if re.match(r"(radixrt|python3?|make|pytest)\s+\S", line)]


def code_of(page: Path) -> str:
    """Everything that the page writes as code."""
    return "\n".join(
        [*blocks(page, "python", "bash", "text", "json", ""), *indented(page), *spans(page)]
    )


def names_in(page: Path) -> set[str]:
    """The identifiers in the page's code."""
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", code_of(page)))
