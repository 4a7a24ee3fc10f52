"""A browser on the server's page: Debian's Chromium, driven by Playwright. The tests are skipped
where either is missing."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.api.conftest import (  # noqa: F401 (fixtures)
    model_folder,
    server,
    shared_server,
    start_server,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

OpenPage = Callable[..., "contextlib.AbstractContextManager[Page]"]
PATIENCE_MS = 20_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright (make test-browser)"
    )
    with playwright.sync_playwright() as engine:
        found = engine.chromium.launch(executable_path=chromium, args=FLAGS)
        yield found
        found.close()


def ask(page: "Page", text: str) -> str:
    """Send a message; returns the answer's entry once it is complete."""
    before = page.locator(".message.assistant footer").count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    page.locator(".message.assistant footer").nth(before).wait_for()
    return page.locator(".message.assistant").last.inner_text()


@pytest.fixture
def open_page(browser: "Browser") -> OpenPage:
    """Opens the page of a server. At the end of the block: no console error, and no request to
    another host."""

    @contextlib.contextmanager
    def open_it(url: str, **options: Any) -> Iterator["Page"]:
        page = browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        errors: list[str] = []
        hosts: set[str] = set()
        page.on("console", lambda line: errors.append(line.text) if _is_error(line) else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(url)
        yield page
        page.close()
        assert not errors
        assert hosts == {urlsplit(url).netloc}

    return open_it


def _is_error(line: "ConsoleMessage") -> bool:
    """Chromium also notes each response of status 400 to 499, which the page shows in its own
    words."""
    is_refusal = line.text.startswith(
        "Failed to load resource: the server responded with a status of 4"
    )
    return line.type in ("error", "warning") and not is_refusal
