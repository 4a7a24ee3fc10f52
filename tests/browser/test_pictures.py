"""Pictures on the page: dropped, pasted and chosen; a tiny model answers about them."""

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.browser.conftest import OpenPage, ask
from tests.checkpoints.image_checkpoints import make_image_checkpoint, picture, png
from tests.servers import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUESTION = "What is in this picture?"
HAND_OVER = """(event, [type, data]) => {
    const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "picture", { type }));
    return event === "paste"
        ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
        : new DragEvent(event, { dataTransfer: transfer, bubbles: true, cancelable: true });
}"""
"""An event with a file, as a browser gives it."""


@pytest.fixture(scope="module")
def seeing(browser: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """After the browser, without which nothing is served."""
    folder = make_image_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    flags = ("--served-model-name", "tiny", "--page-size", "4", "--log-level", "warning")
    with serving(folder, *flags) as server:
        yield server


def give(page: "Page", event: str, selector: str, data: str, kind: str = "image/png") -> bool:
    """Paste or drop a file. Returns whether the page has taken it."""
    script = f"([selector, event, file]) => !document.querySelector(selector).dispatchEvent(({HAND_OVER})(event, file))"
    return bool(page.evaluate(script, [selector, event, [kind, data]]))


def answer_of_the_api(server: Server, *images: str) -> str:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        for data in images
    ]
    content = [*parts, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def test_a_picture_is_pasted_dropped_shown_and_sent(open_page: OpenPage, seeing: Server) -> None:
    one, two, three = (png(picture(seed)) for seed in (1, 2, 3))
    sent: list[dict[str, Any]] = []
    with open_page(seeing.url) as page:
        page.on(
            "request",
            lambda request: (
                sent.append(json.loads(request.post_data or "{}"))
                if request.url.endswith("/chat/completions")
                else None
            ),
        )
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("8")
        assert give(page, "paste", "#message", one)
        assert give(page, "dragover", "#messages", two)
        assert give(page, "drop", "#messages", two)
        remove = page.get_by_role("button", name="Remove image")
        remove.nth(1).wait_for()
        page.locator("#picture-file").set_input_files(
            {"name": "c.png", "mimeType": "image/png", "buffer": base64.b64decode(three)}
        )
        remove.nth(2).wait_for()
        remove.nth(1).click()
        assert remove.count() == 2
        assert not give(page, "paste", "#message", base64.b64encode(b"text").decode(), "text/plain")
        text = ask(page, QUESTION)
        assert answer_of_the_api(seeing, one, three).strip() in text
        (body,) = sent
        (message,) = body["messages"]
        urls = [part["image_url"]["url"] for part in message["content"][:2]]
        assert urls == [f"data:image/png;base64,{data}" for data in (one, three)]
        assert remove.count() == 0, "they are sent once"
        shown = page.locator(".message.user .pictures img")
        assert shown.count() == 2
        assert shown.first.evaluate("e => e.complete && e.naturalWidth") == 40
        page.reload()
        page.locator(".message.assistant footer").wait_for()
        assert shown.count() == 2, "the browser keeps them"
        page.locator(".message.user").get_by_role("button", name="Edit").click()
        page.get_by_label("Edited message").fill("Another question?")
        page.locator(".edit").get_by_role("button", name="Send").click()
        page.locator(".message.assistant .turner, .message.assistant footer").last.wait_for()
        assert len(sent) == 2
        assert sent[1]["messages"][0]["content"][:2] == message["content"][:2]


def test_a_picture_alone_is_a_message_and_no_other_address_is_shown(
    open_page: OpenPage, seeing: Server
) -> None:
    with open_page(seeing.url) as page:
        page.get_by_label("Max tokens").fill("4")
        give(page, "paste", "#message", png(picture(5)))
        page.get_by_role("button", name="Remove image").wait_for()
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant footer").wait_for()
        assert page.locator(".message.user .text").is_hidden()
    policy = httpx.get(seeing.url, headers={"accept": "text/html"}).headers
    assert "img-src 'self' data:;" in policy["content-security-policy"]
