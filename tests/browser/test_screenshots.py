"""The screenshots of the documentation: they are of this version of the page, and a test makes
them."""

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from radixrt.api.page.files import FOLDER
from tests.browser.conftest import OpenPage, ask
from tests.servers import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
VERSION = IMAGES / "page_version.txt"
"""A digest of the files of the page that the screenshots show."""

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
TOWNS = {"Dorvel": ("Kanuta", "Smeno"), "Prilam": ("Oshek", "Vanto"), "Zekoru": ("Bralin", "Thame")}
FACTS = " ".join(
    f"The mayor of {town} is {mayor}. The river of {town} is {river}."
    for town, (mayor, river) in TOWNS.items()
)

needs_order = pytest.mark.skipif(
    "RADIXRT_SCREENSHOTS" not in os.environ, reason="make screenshots takes them"
)


def page_version() -> str:
    files = sorted(file for file in FOLDER.iterdir() if file.suffix in (".js", ".css", ".html"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own, whose counters and tree show nothing but this traffic."""
    flags = ["--served-model-name", "demo", "--log-level", "warning", "--max-total-tokens", "16384"]
    with serving("demo", *flags) as server:
        yield server.url


def take(page: "Page", name: str) -> None:
    page.wait_for_timeout(600)  # transitions
    page.screenshot(path=IMAGES / f"page_{name}.png")


@needs_order
def test_the_playground(open_page: OpenPage, url: str) -> None:
    with open_page(url, viewport=DESKTOP, color_scheme="light") as page:
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("System prompt").fill(f"It is 10:41. {FACTS}")
        ask(page, "What is the mayor of Dorvel?")
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("System prompt").fill(f"It is 10:42. {FACTS}")
        ask(page, "What is the river of Prilam?")
        ask(page, "And the mayor?")
        page.locator(".why").scroll_into_view_if_needed()
        take(page, "playground")


@needs_order
def test_the_cache_and_the_dashboard(open_page: OpenPage, url: str) -> None:
    ended = threading.Event()

    def chat() -> None:
        number = 0
        with httpx.Client(base_url=url, timeout=60) as http:
            while not ended.is_set():
                number += 1
                town = list(TOWNS)[number % 3]
                messages = [
                    {"role": "system", "content": f"You are the guide of group {number % 7}. {FACTS}"},
                    {"role": "user", "content": f"What is the {('mayor', 'river')[number % 2]} of {town}?"},
                ]  # fmt: skip
                body = {
                    "messages": messages,
                    "max_tokens": 12 + number % 20,
                    "ignore_eos": True,
                    "stream": True,
                }
                http.post("/v1/chat/completions", json=body)
                ended.wait(0.1 + 0.4 * (number % 5 == 0))

    threads = [threading.Thread(target=chat) for _ in range(3)]
    for thread in threads:
        thread.start()
    with open_page(f"{url}/#dashboard", viewport=DESKTOP, color_scheme="light") as page:
        page.wait_for_timeout(45_000)
        take(page, "dashboard")
        page.get_by_role("link", name="Cache").click()
        page.locator(".cell").nth(3).click()
        page.get_by_role("button", name="Pin for").click()
        page.locator("#deed", has_text="Pinned").wait_for()
        page.wait_for_timeout(1_500)
        take(page, "cache")
    ended.set()
    for thread in threads:
        thread.join()


@needs_order
def test_a_phone(open_page: OpenPage, url: str) -> None:
    options = {"has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    with open_page(url, viewport=PHONE, color_scheme="dark", **options) as page:
        page.locator(".examples button").first.tap()
        page.locator(".message.assistant footer").wait_for()
        take(page, "phone")
    VERSION.write_text(f"{page_version()}\n")


def test_the_screenshots_are_of_this_version_of_the_page(browser: object) -> None:
    """Where there is a browser to take them anew."""
    assert VERSION.read_text().strip() == page_version(), "run `make screenshots` and look at them"
