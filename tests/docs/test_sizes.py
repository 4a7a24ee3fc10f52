"""The documentation stays one that a user can read: limits on words, on cells of tables, and on
whom a page is for."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

MAX_README_WORDS = 1_000
MAX_CHANGELOG_WORDS = 700
"""One page."""
MAX_USER_WORDS = 32_000
"""Of all guides and references together."""
MAX_TOUR_WORDS = 2_500
MAX_CELL_CHARACTERS = 200
HISTORY = re.compile(
    r"\b20\d\d-\d\d-\d\d\b|\b(EPYC|Zen \d|Xeon)\b|\b(until then|used to be)\b", re.I
)

USER_PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_the_readme_is_short() -> None:
    assert words(ROOT / "README.md") <= MAX_README_WORDS


def test_the_changelog_of_a_first_release_is_one_page() -> None:
    assert words(ROOT / "CHANGELOG.md") <= MAX_CHANGELOG_WORDS


def test_guides_and_references_are_read_in_an_hour_or_two() -> None:
    sizes = {page.name: words(page) for page in USER_PAGES}
    assert sum(sizes.values()) <= MAX_USER_WORDS, sorted(sizes.items(), key=lambda item: -item[1])


def test_the_tour_of_the_architecture_is_short() -> None:
    assert words(ROOT / "docs" / "internals" / "architecture.md") <= MAX_TOUR_WORDS


@pytest.mark.parametrize("page", [ROOT / "README.md", *USER_PAGES], ids=lambda page: page.name)
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert not [cell for cell in cells if len(cell) > MAX_CELL_CHARACTERS]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_pages_for_users_have_no_dates_and_no_machines(page: Path) -> None:
    """Measurements and history are in docs/internals, the changelog and the commits."""
    found = HISTORY.search(page.read_text())
    assert found is None, f"{page.name}: {found[0] if found else ''}"
