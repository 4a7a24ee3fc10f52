"""The web site of the documentation is built without a warning, and a broken link is one."""

import pytest

from tests.docs.pages import PAGES, ROOT
from tools.docs_site import __main__ as site


def test_a_link_to_a_missing_file_ends_the_build() -> None:
    with pytest.raises(SystemExit, match=r"no_page\.md, which is not there"):
        site._for_site("See [this](no_page.md).", "docs/api.md")


def test_links_lead_to_pages_of_the_site() -> None:
    """Whatever their place in the repository; files that are no page become text."""
    text = "[a](../README.md) [b](api.md#models) [c](../Makefile) [d](https://example.com)"
    expected = "[a](quickstart.md) [b](api.md#models) c [d](https://example.com)"
    assert site._for_site(text, "docs/server.md") == expected
    assert site._for_site("[e](../server.md)", "docs/guides/rag.md") == "[e](../server.md)"


def test_every_page_is_in_the_side_bar() -> None:
    """Sphinx says so as well, where it is installed."""
    paths = [page.relative_to(ROOT).with_suffix("") for page in PAGES]
    docs = [path for path in paths if path.parts[0] == "docs" and path.name != "README"]
    pages = {path.relative_to("docs").as_posix() for path in docs}
    shown = {page for pages in site.NAVIGATION.values() for page in pages}
    assert not pages - shown


def test_the_site_has_no_broken_link() -> None:
    pytest.importorskip("furo", reason="needs Sphinx (make docs-site)")
    site.write_sources()
    assert site.build() == 0
    page = site.SOURCES / "guides" / "rag.md"
    page.write_text(page.read_text() + "\n[nowhere](../api.md#no-such-heading)\n")
    assert site.build() != 0
