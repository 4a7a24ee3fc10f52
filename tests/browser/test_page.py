"""The web page in a real browser."""

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import OpenPage
from tests.servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUESTION = "The owner of Vidur is Noval. The port of Vidur is Teska. What is the owner of Vidur?"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="session")
def url(demo_server: Server, browser: object) -> str:
    return demo_server.url


def ask(page: "Page", text: str) -> str:
    """Send a message; returns the answer's entry once it is complete."""
    before = page.locator(".message.assistant footer").count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    page.locator(".message.assistant footer").nth(before).wait_for()
    return page.locator(".message.assistant").last.inner_text()


def test_an_answer_streams_with_the_share_of_its_prompt_that_was_cached(
    open_page: OpenPage, url: str
) -> None:
    with open_page(url) as page:
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("System prompt").fill("You answer questions about harbours.")
        first = ask(page, QUESTION)
        assert "The owner of Vidur is Noval." in first and "tokens/s" in first
        second = ask(page, "And the port?")
        cached = re.search(r"(\d+) from the cache", second)
        assert cached and int(cached[1]) >= 48
        assert page.locator(".prompt-bar .cached").count() >= 1


def test_an_answer_can_be_stopped_and_asked_for_again(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        page.get_by_label("Temperature").fill("1.5")
        page.get_by_label("Message").fill("Tell a story.")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        page.locator(".message.assistant footer", has_text="stopped").wait_for()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("4")
        page.get_by_role("button", name="Answer again").click()
        page.locator(".message.assistant footer", has_text="length").wait_for()
        assert page.locator(".message").count() == 2


def test_a_schema_has_its_verdict_and_holds(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        schema, verdict = page.get_by_label("JSON schema"), page.locator("#schema-verdict")
        schema.fill('{"type": "objct"}')
        page.locator("#schema-verdict.bad").wait_for()
        assert "/type" in verdict.inner_text()
        schema.fill(
            '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true, "maxItems": 3}'
        )
        page.locator("#schema-verdict.good").wait_for()
        assert "llguidance" in verdict.inner_text() and "uniqueItems" in verdict.inner_text()
        page.get_by_label("Temperature").fill("0")
        assert re.search(r"^\[[\d,\s-]*\]$", ask(page, QUESTION), re.M)


def test_a_text_of_html_stays_text(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        page.get_by_label("Most tokens").fill("1")
        ask(page, "<img src=https://evil.example/ onerror=alert(1)><script>alert(2)</script>")
        assert page.locator(".message.user .text").inner_text().startswith("<img src=")
        assert page.locator(".message img, .message script").count() == 0


def test_the_page_fits_a_phone(open_page: OpenPage, url: str) -> None:
    with open_page(url, viewport=PHONE) as page:
        page.get_by_label("Most tokens").fill("8")
        ask(page, QUESTION + "x" * 200)
        for view in ("Playground", "Dashboard", "Cache"):
            page.get_by_role("link", name=view).click()
            assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_every_field_has_a_name(open_page: OpenPage, url: str) -> None:
    """What a screen reader says: a label of each control, one heading of each view, a language."""
    with open_page(url) as page:
        nameless = page.evaluate(
            """[...document.querySelectorAll("input, textarea, select, button")].filter((field) =>
               !field.labels?.length && !field.ariaLabel && !field.textContent.trim()).map((field) => field.outerHTML)"""
        )
        assert nameless == []
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.evaluate(
            """[...document.querySelectorAll("[aria-labelledby], [aria-describedby]")].every((one) =>
               document.getElementById(one.getAttribute("aria-labelledby") ?? one.getAttribute("aria-describedby")))"""
        )


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(
    open_page: OpenPage, url: str
) -> None:
    with open_page(url) as page:
        names = []
        for _ in range(9):
            page.keyboard.press("Tab")
            names.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))  # fmt: skip
        assert names == [
            "Skip to the content", "radixrt", "Playground", "Dashboard", "Cache", "key-button", "theme-button",
            "messages", "message",
        ]  # fmt: skip
