"""Every snippet of docs/lang.md runs, and prints what the page says."""

import contextlib
import io
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radixrt.lang as rl

PAGE = Path(__file__).parents[2] / "docs" / "lang.md"
SNIPPETS = re.findall(
    r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL
)


@pytest.fixture
def default_backend(backend: rl.Server) -> Iterator[None]:
    rl.set_default_backend(backend)
    yield
    rl.set_default_backend(None)


def test_every_snippet_says_what_it_prints() -> None:
    assert PAGE.read_text().count("```python") == len(SNIPPETS) >= 10


@pytest.mark.usefixtures("default_backend")
def test_snippets_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # they may write files
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for number, (snippet, expected) in enumerate(SNIPPETS):
        name = f"<snippet {number + 1} of lang.md>"
        linecache.cache[name] = (len(snippet), None, snippet.splitlines(keepends=True), name)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet, name, "exec"), namespace)
        assert printed.getvalue() == expected, snippet
