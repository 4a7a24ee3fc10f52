"""The page as a chat: Markdown, copies, branches, what the browser keeps, phones, completions."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.conftest import RunningServer, StartServer
from tests.browser.conftest import OpenPage, ask
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import engine_info

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PHONE = {"width": 360, "height": 640}
MARKDOWN = """# Title

A **bold** word, a [link](https://example.com/a) and `x < y` &amp; 1 &lt; 2.

3. three
4. four
   - nested

```python
def f():
    return "<b>"
```

| a | b |
|---|--:|
| 1 | 2 |
"""


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(engine_info(context_length=16384))


def until(condition: Callable[[], bool]) -> None:
    """The page's policy forbids Playwright's own wait_for_function, which evaluates a text."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def messages(page: "Page") -> list[str]:
    return page.locator(".message .text").all_inner_texts()


def test_an_answer_in_markdown_is_rendered_while_it_comes(
    open_page: OpenPage, server: RunningServer
) -> None:
    server.answer_with(MARKDOWN)
    with open_page(server.url) as page:
        ask(page, "*Not* rendered")
        answer = page.locator(".message.assistant .text")
        assert answer.locator("h3").inner_text() == "Title"
        assert answer.locator("p", has_text="bold").inner_html() == (
            'A <strong>bold</strong> word, a <a href="https://example.com/a" title="https://example.com/a" target="_blank" '
            'rel="noopener noreferrer nofollow">link</a> and <code>x &lt; y</code> &amp; 1 &lt; 2.'
        )
        assert answer.locator("ol").get_attribute("start") == "3"
        assert answer.locator("ol ul li").inner_text() == "nested"
        assert answer.locator("pre code").inner_text() == 'def f():\n    return "<b>"'
        assert answer.locator("figcaption span").inner_text() == "python"
        assert answer.locator("td").all_inner_texts() == ["1", "2"]
        assert messages(page)[0] == "*Not* rendered", "what people write stays as they wrote it"


def test_an_answer_and_its_code_can_be_copied(open_page: OpenPage, server: RunningServer) -> None:
    server.answer_with(MARKDOWN)
    with open_page(server.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        ask(page, "Copy")
        entry = page.locator(".message.assistant")
        for name, text in (("Copy code", 'def f():\n    return "<b>"'), ("Copy", MARKDOWN)):
            entry.get_by_role("button", name=name, exact=True).click()
            until(lambda text=text: page.evaluate("navigator.clipboard.readText()") == text)  # type: ignore[misc]
            entry.get_by_role("button", name="Copied").first.wait_for()


def test_a_page_without_tls_copies_in_the_old_way(
    open_page: OpenPage, server: RunningServer
) -> None:
    """Browsers have navigator.clipboard on https and localhost only."""
    server.answer_with("plain answer")
    with open_page(server.url) as page:
        ask(page, "Copy")
        page.evaluate("""() => {
            Object.defineProperty(navigator, "clipboard", { value: undefined });
            document.addEventListener("copy", () => (window.copied = document.activeElement.value));
        }""")
        page.locator(".message.assistant").get_by_role("button", name="Copy").click()
        page.locator(".message.assistant").get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("window.copied") == "plain answer"
        assert page.locator("body > textarea").count() == 0


def test_an_edited_message_begins_a_branch_and_the_other_one_stays(
    open_page: OpenPage, server: RunningServer
) -> None:
    with open_page(server.url) as page:
        server.answer_with("first answer")
        ask(page, "first question")
        server.answer_with("second answer")
        ask(page, "second question")
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edited message").fill("edited question")
        server.answer_with("another answer")
        page.locator(".edit").get_by_role("button", name="Send").click()
        page.get_by_text("another answer").wait_for()
        assert messages(page) == ["edited question", "another answer"]
        prompt = server.scheduler.requests[-1].token_ids
        text = server.vocabulary.decode(memoryview(prompt).cast("i").tolist())
        assert "edited question" in text and "first" not in text and "second" not in text
        page.get_by_role("button", name="Previous version").click()
        assert messages(page) == ["first question", "first answer", "second question", "second answer"]  # fmt: skip
        server.answer_with("third answer")
        page.locator(".message.assistant").last.get_by_role("button", name="Answer again").click()
        page.get_by_text("third answer").wait_for()
        page.locator(".message.assistant .turner", has_text="2/2").wait_for()
        assert messages(page)[2:] == ["second question", "third answer"]


def test_a_reload_changes_nothing(open_page: OpenPage, server: RunningServer) -> None:
    server.answer_with(MARKDOWN)
    settings = {"System prompt": "Be brief.", "Temperature": "0.5", "JSON schema": "", "Tools": "[]"}  # fmt: skip
    with open_page(server.url) as page:
        for label, value in settings.items():
            page.get_by_label(label).fill(value)
        ask(page, "Will this stay?")
        before = page.locator("#messages").inner_text()
        page.reload()
        page.locator(".message.assistant footer").wait_for()
        assert page.locator("#messages").inner_text() == before
        assert {label: page.get_by_label(label).input_value() for label in settings} == settings
        page.get_by_role("button", name="Reset the settings").click()
        page.reload()
        assert page.get_by_label("System prompt").input_value() == ""


def test_conversations_are_listed_exported_and_deleted(
    open_page: OpenPage, server: RunningServer, tmp_path: Path
) -> None:
    server.answer_with("yes")
    with open_page(server.url) as page:
        for question in ("one", "two", "three"):
            ask(page, f"number {question}")
            page.get_by_role("button", name="New chat").click()
        titles = page.locator("#chat-list .title span")
        assert titles.all_inner_texts() == ["number three", "number two", "number one"]
        titles.last.click()
        assert messages(page) == ["number one", "yes"]
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        exported = json.loads(download.value.path().read_text())
        texts = [one["messages"][0]["content"] for one in exported["conversations"]]
        assert texts == ["number three", "number two", "number one"]
        page.get_by_role("button", name="Delete number two").click()
        until(lambda: titles.count() == 2)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete all").click()
        until(lambda: titles.count() == 0)
        assert messages(page) == []
        page.reload()
        page.locator(".welcome").wait_for()
        assert page.locator("#chat-list li").count() == 0


def test_on_a_phone_the_bar_stays_and_the_end_of_the_answer_is_in_view(
    open_page: OpenPage, server: RunningServer
) -> None:
    server.scheduler.step_s = 0.01
    server.answer_endlessly("word ")
    with open_page(server.url, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        page.get_by_label("Message").fill("A long answer, please.")
        page.get_by_role("button", name="Send").tap()
        view = page.locator("#messages")
        until(lambda: view.evaluate("e => e.scrollTop") > 400)
        assert view.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") < 60
        view.evaluate("e => { e.scrollTop -= 300; }")  # who reads an earlier part is left there
        page.wait_for_timeout(300)
        assert view.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") > 200
        stop = page.get_by_role("button", name="Stop")
        box = stop.bounding_box()
        assert box and box["y"] >= 0 and box["y"] + box["height"] <= PHONE["height"]
        stop.tap()
        page.locator(".message.assistant footer", has_text="stopped").wait_for()
        assert page.evaluate("document.documentElement.scrollHeight") == PHONE["height"]
    server.scheduler.step_s = 0.0


def test_a_model_without_a_chat_template_continues_texts(
    open_page: OpenPage, start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(model=save_byte_level(tmp_path, chat_template=None))
    server.answer_with(" jumps over")
    with open_page(server.url) as page:
        page.get_by_label("Message").fill("The quick brown fox")
        page.get_by_label("Message").press("Enter")
        page.get_by_text("has no chat template").wait_for()
        assert page.get_by_label("Mode", exact=True).input_value() == "completion"
        page.get_by_role("button", name="Answer again").click()
        page.locator(".message.assistant footer").wait_for()
        assert messages(page)[-1].strip() == "jumps over"
        page.get_by_label("Text to continue").fill(" the lazy")
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant footer").nth(1).wait_for()
        prompt = memoryview(server.scheduler.requests[-1].token_ids).cast("i").tolist()
        assert server.vocabulary.decode(prompt) == "The quick brown fox jumps over the lazy"
        page.reload()
        page.locator(".message.assistant footer").nth(1).wait_for()
        assert page.get_by_label("Mode", exact=True).input_value() == "completion"


def test_one_of_several_models_can_be_chosen(open_page: OpenPage, server: RunningServer) -> None:
    asked: list[str] = []

    def answer(route: "Route") -> None:
        asked.append(json.loads(route.request.post_data or "")["model"])
        event = {"choices": [{"delta": {"content": "yes"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}  # fmt: skip
        route.fulfill(body=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    with open_page(server.url) as page:
        listed = {"data": [{"id": "small"}, {"id": "large"}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        page.route("**/v1/chat/completions", answer)
        page.reload()
        page.get_by_label("Model", exact=True).select_option("large")
        ask(page, "Which one?")
        page.reload()
        page.get_by_label("Model", exact=True).wait_for()
        assert page.get_by_label("Model", exact=True).input_value() == "large"
        assert asked == ["large"]


def test_json_is_shown_as_it_is(open_page: OpenPage, server: RunningServer) -> None:
    server.answer_with('{"a": "*x* _y_"}')
    with open_page(server.url) as page:
        page.get_by_label("JSON schema").fill('{"type": "object"}')
        ask(page, "JSON")
        assert re.search(r'\{"a": "\*x\* _y_"\}', messages(page)[-1])
