"""Answers, tool results and stored conversations that try to run a script or to load something.

The answers come from a real api; :func:`open_page` checks that no console error (a violation of the
Content-Security-Policy is one) and no request to another host came of them.
"""

import json
from typing import TYPE_CHECKING

import pytest

from tests.api.conftest import RunningServer, StartServer
from tests.browser.conftest import OpenPage, ask
from tests.servers.fake_scheduler import engine_info

if TYPE_CHECKING:
    from playwright.sync_api import Page

SVG = "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImRvY3VtZW50LnRpdGxlPSdYU1MnIi8+"
ATTACKS = [
    "<img src=x onerror=\"document.title='XSS'\">",
    "<script>document.title='XSS'</script>",
    "text <b onmouseover=\"document.title='XSS'\">bold</b> <iframe src=https://evil.example/></iframe>",
    "<svg onload=\"document.title='XSS'\"><a xlink:href=\"javascript:document.title='XSS'\"><text>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=\"document.title='XSS'\">",
    "<base href=https://evil.example/><meta http-equiv=refresh content=0;url=https://evil.example/>",
    "<form action=https://evil.example/><input name=key><button>Send</button></form>",
    "[click](javascript:document.title='XSS')",
    "[click](JaVaScRiPt:document.title='XSS') [click](java&#115;cript:document.title='XSS')",
    "[click](java\tscript:document.title='XSS') [click](\x01javascript:document.title='XSS')",
    "[click](<javascript:document.title='XSS'>) <javascript:document.title='XSS'>",
    "[click](vbscript:x) [click](data:text/html,<script>document.title='XSS'</script>) [click](file:///etc/passwd)",
    "[click][1]\n\n[1]: javascript:document.title='XSS'",
    "[click](/flush_cache) [click](//evil.example/) [click](blob:https://evil.example/x)",
    '[a](https://evil.example/" onclick="document.title=1) [b](https://evil.example "x\\" onclick=\\"y")',
    f"![pixel](https://evil.example/pixel.png) ![svg]({SVG}) ![x](javascript:x)",
    "```\"><img src=x onerror=document.title='XSS'>\n</code></pre><script>document.title='XSS'</script>\n```",
    "`</code><img src=x onerror=document.title='XSS'>`",
    "| <img src=x onerror=document.title='XSS'> |\n|---|\n| <script>document.title='XSS'</script> |",
    "- [x] <img src=x onerror=document.title='XSS'>\n> <script>document.title='XSS'</script>",
    "&lt;img src=x onerror=document.title='XSS'&gt; &#60;script&#62;document.title='XSS'&#60;/script&#62;",
]

HTML = range(7)
"""The attacks that are HTML alone."""

EVERYTHING = """() => {
    const found = document.querySelectorAll(".messages img, .messages script, .messages iframe, .messages svg, .messages style, " +
        ".messages object, .messages embed, .messages base, .messages meta, .messages input, .messages .text [style], .messages [src]");
    const elements = [...document.querySelectorAll(".messages *")];
    const handlers = elements.filter((one) => [...one.attributes].some(({ name }) => name.startsWith("on")));
    const links = [...document.querySelectorAll(".messages a")].filter((a) => !["http:", "https:", "mailto:"].includes(a.protocol));
    return [...found, ...handlers, ...links].map((one) => one.outerHTML);
}"""


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """Takes conversations of all attacks together."""
    return start_server(engine_info(context_length=16384))


def assert_inert(page: "Page") -> None:
    assert page.evaluate(EVERYTHING) == []
    for link in page.locator(".messages a").all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert "evil.example" in (link.get_attribute("title") or ""), "it says where it leads"
    assert "XSS" not in page.title()


def test_answers_are_inert(open_page: OpenPage, server: RunningServer) -> None:
    with open_page(server.url) as page:
        for number, attack in enumerate(ATTACKS):
            server.answer_with(attack)
            text = ask(page, f"Attack {number}")
            if number in HTML:
                assert attack[-12:] in text.replace("\n", ""), "HTML is shown as it was written"
        assert page.locator(".message.assistant").count() == len(ATTACKS)
        assert_inert(page)


def test_a_kept_conversation_stays_inert_when_it_is_shown_again(
    open_page: OpenPage, server: RunningServer
) -> None:
    server.answer_with("\n\n".join(ATTACKS))
    with open_page(server.url) as page:
        ask(page, ATTACKS[0])
        page.reload()
        page.locator(".message.assistant footer").wait_for()
        assert_inert(page)
        assert page.locator("#chat-list").inner_text().startswith("<img src=x")


def test_calls_and_results_of_tools_are_inert(open_page: OpenPage, server: RunningServer) -> None:
    call = {"name": "look_up", "arguments": {"ship": ATTACKS[0], "link": ATTACKS[7]}}
    server.answer_with(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    tool = {"name": "look_up", "parameters": {"type": "object"}}
    with open_page(server.url) as page:
        page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": tool}]))
        page.get_by_label("Message").fill("Look it up.")
        page.get_by_label("Message").press("Enter")
        page.locator(".call", has_text="look_up(").wait_for()
        page.get_by_label("Result of look_up").fill("\n".join(ATTACKS))
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant footer").nth(1).wait_for()
        assert page.locator(".message.tool .text").inner_text().startswith("<img src=x")
        assert_inert(page)


def test_a_text_that_is_hard_to_parse_does_not_hang_the_page(
    open_page: OpenPage, server: RunningServer
) -> None:
    """Each took marked seconds or more memory than there is, as one paragraph of this length."""
    hard = [
        "_a_",
        "**a",
        "~a~~",
        "[",
        "![",
        "[a](",
        "<a ",
        ">",
        "- ",
        "\n- a",
        "`a``",
        "|a|\n|-|\n",
    ]
    with open_page(server.url) as page:
        times_ms = page.evaluate(
            """async (hard) => {
                const { Markdown } = await import("/page/markdown.js");
                return hard.map((text) => {
                    const began = performance.now(), shown = new Markdown();
                    shown.text = text.repeat(20000);
                    shown.render();
                    return performance.now() - began;
                });
            }""",
            hard,
        )
    assert max(times_ms) < 5000, dict(zip(hard, times_ms, strict=True))
