"""The web page in a real browser."""

import json
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api.conftest import StartServer
from tests.browser.conftest import OpenPage, ask
from tests.servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Route

QUESTION = "The owner of Vidur is Noval. The port of Vidur is Teska. What is the owner of Vidur?"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="session")
def url(demo_server: Server, browser: object) -> str:
    return demo_server.url


def test_an_answer_streams_with_the_share_of_its_prompt_that_was_cached(
    open_page: OpenPage, url: str
) -> None:
    with open_page(url) as page:
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("System prompt").fill("You answer questions about harbours.")
        first = ask(page, QUESTION)
        assert "The owner of Vidur is Noval." in first and "tokens/s" in first
        second = ask(page, "And the port?")
        cached = re.search(r"(\d+) of \d+ prompt tokens from the cache", second)
        assert cached and int(cached[1]) >= 48
        assert page.locator(".prompt-bar .cached").count() >= 1


def test_why_a_prompt_missed_the_cache_is_told(open_page: OpenPage, url: str) -> None:
    divergence = {"token_index": 41, "message_index": 0, "role": "system", "prompt_text": "It is 10:32.", "cached_text": "It is 10:31."}  # fmt: skip
    explanation = {"cause": "volatile_text", "detail": "A time differs.", "divergence": divergence}
    usage = {"prompt_tokens": 60, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32, "disk_tokens": 16}}  # fmt: skip
    event = {"choices": [], "usage": usage, "cache_explanation": explanation}
    asked: list[str] = []

    def answer(route: "Route") -> None:
        asked.append(route.request.headers["x-radixrt-explain-cache"])
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    with open_page(url) as page:
        page.route("**/v1/chat/completions", answer)
        text = ask(page, "Hi")
        assert asked == ["1"]
        assert "volatile text: A time differs." in text and "32 of 60 prompt tokens" in text
        assert "16 from the cache on disk" in text
        page.get_by_text("The difference begins after 41 tokens in the system prompt").click()
        assert page.locator(".why pre").all_inner_texts() == ["It is 10:32.", "It is 10:31."]


def test_a_miss_that_nobody_can_avoid_is_folded(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        page.get_by_label("Max tokens").fill("1")
        text = ask(page, "A question that nobody has asked before.")
        assert page.locator(".why").count() == 0 and "new" not in text
        page.locator(".message footer summary").click()
        assert "new" in page.locator(".message footer").inner_text()


def test_the_progress_of_a_long_prompt_is_shown(open_page: OpenPage, url: str) -> None:
    facts = " ".join(f"The owner of Vidur{i} is Noval." for i in range(250))
    with open_page(url) as page:
        page.get_by_label("Max tokens").fill("1")
        page.get_by_label("Message").fill(facts)
        page.get_by_label("Message").press("Enter")
        progress = page.locator(".message .progress")
        progress.wait_for()
        assert re.search(r"Reading the prompt: [\d,]+ of [\d,]{5,} tokens", progress.inner_text())
        page.locator(".message.assistant footer").wait_for()
        assert progress.count() == 0


def test_each_example_of_an_empty_page_is_answered(open_page: OpenPage, url: str) -> None:
    """The built-in model knows only the facts in its prompt."""
    with open_page(url) as page:
        page.locator("#connection.live").wait_for()
        page.get_by_label("Temperature").fill("0")
        for index, answer in enumerate(("Noval", "Smeno", "glass")):
            page.locator(".examples button").nth(index).click()
            page.locator(".message.assistant footer").wait_for()
            assert f"is {answer}." in page.locator(".message.assistant").inner_text()
            page.get_by_role("button", name="New chat").click()


def test_an_answer_can_be_stopped_and_asked_for_again(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        page.get_by_label("Temperature").fill("1.5")
        page.get_by_label("Message").fill("Tell a story.")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        page.locator(".message.assistant footer", has_text="stopped").wait_for()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("4")
        page.get_by_role("button", name="Answer again").click()
        page.locator(".message.assistant footer", has_text="cut off").wait_for()
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
        page.locator("#schema-verdict.warning").wait_for()
        assert "llguidance" in verdict.inner_text() and "uniqueItems" in verdict.inner_text()
        page.get_by_label("Temperature").fill("0")
        assert re.search(r"^\[[\d,\s-]*\]$", ask(page, QUESTION), re.M)
        facts = page.locator(".message.assistant footer").last.inner_text()
        assert re.search(r"the schema kept [\d.]+ % of the probability", facts)


def test_a_tool_is_called_and_gets_its_result(open_page: OpenPage, url: str) -> None:
    tool = {"name": "look_up", "parameters": {"type": "object", "properties": {"ship": {"type": "string"}}, "required": ["ship"]}}  # fmt: skip
    with open_page(url) as page:
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": tool}]))
        page.get_by_text("One tool: look_up.").wait_for()
        assert 'look_up({"ship": "Vidur"})' in ask(page, "Look up the ship Vidur.")
        page.get_by_label("Result of look_up").fill('{"owner": "Noval"}')
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant footer").nth(1).wait_for()
        assert "Noval" in page.locator(".message.assistant").last.inner_text()


def test_a_text_of_html_stays_text(open_page: OpenPage, url: str) -> None:
    with open_page(url) as page:
        page.get_by_label("Max tokens").fill("1")
        ask(page, "<img src=https://evil.example/ onerror=alert(1)><script>alert(2)</script>")
        assert page.locator(".message.user .text").inner_text().startswith("<img src=")
        assert page.locator(".message img, .message script").count() == 0


def test_the_page_fits_a_phone(open_page: OpenPage, url: str) -> None:
    with open_page(url, viewport=PHONE) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("8")
        page.keyboard.press("Escape")
        ask(page, QUESTION + "x" * 200)
        for view in ("Playground", "Dashboard", "Cache"):
            page.get_by_role("link", name=view).click()
            assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.get_by_role("treeitem", name=re.compile("tokens.*used")).first.click()
        page.locator("#details .prefix").wait_for()
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
        page.locator("#connection.live").wait_for()
        page.locator(".examples button").first.wait_for()
        for _ in range(14):
            page.keyboard.press("Tab")
            names.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 18)"))  # fmt: skip
        assert names == [
            "Skip to the conten", "radixrt", "Playground", "Dashboard", "Cache", "key-button", "theme-button",
            "new-chat", "messages", "The owner of Vidur", "The mayor of Dorve", "The captain of Kar", "message", "send",
        ]  # fmt: skip


def counters(url: str) -> dict[str, int]:
    return httpx.get(f"{url}/v1/live?nodes=1", timeout=20).json()["engine"]["cache"]


def test_the_dashboard_follows_the_server(open_page: OpenPage, url: str) -> None:
    with open_page(f"{url}/#dashboard") as page:
        page.locator("#connection.live").wait_for()
        tile = page.locator("#tiles div", has_text="Nodes of the tree").locator("b")
        tile.wait_for()
        httpx.post(f"{url}/v1/cache/warm", json={"prompt": "dashboard " * 40}, timeout=20)
        page.locator("#tiles div", has_text="Nodes of the tree").get_by_text(
            f"{counters(url)['tree_nodes']:,}"
        ).wait_for()
        plot = page.get_by_role("img", name=re.compile("KV pool: .*evictable [1-9]"))
        plot.locator("polygon").first.wait_for(state="attached")
        assert page.locator(".chart").count() == 6


def test_the_tree_follows_traffic_and_a_prefix_can_be_read_and_pinned(
    open_page: OpenPage, url: str
) -> None:
    text = "pinned in a picture " + "of the tree " * 400
    with open_page(f"{url}/#cache") as page:
        page.locator(".cell").first.wait_for()
        cell = page.get_by_role("treeitem", name=re.compile("pinned in a picture"))
        assert cell.count() == 0
        httpx.post(f"{url}/v1/cache/warm", json={"prompt": text}, timeout=20)
        cell.wait_for()
        page.get_by_label("Search").fill("PINNED IN A")
        page.get_by_text("1 found").wait_for()
        before = counters(url)["leases"]
        cell.click()
        assert "of the tree of the tree" in page.locator(".prefix").inner_text()
        page.get_by_role("button", name="Pin for").click()
        page.get_by_text(re.compile(r"Pinned [\d,]+ tokens")).wait_for()
        assert counters(url)["leases"] == before + 1
        page.get_by_role("treeitem", name=re.compile("pinned in a picture.*1 pinned")).wait_for()
        page.get_by_role("button", name="Release").click()
        page.get_by_text(re.compile(r"Released [\d,]+ tokens")).wait_for()
        assert counters(url)["leases"] == before


def test_a_prefix_is_named_by_the_text_of_its_messages(open_page: OpenPage, url: str) -> None:
    system = "You know the harbours of Miravo. " * 20
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]}
    httpx.post(f"{url}/v1/cache/warm", json=body, timeout=20)
    with open_page(f"{url}/#cache") as page:
        page.get_by_role("treeitem", name=re.compile("^You know the harbours")).first.wait_for()
        assert "<|im_start|>" not in page.locator("#picture").inner_text()


def test_few_generated_tokens_are_seen_beside_many_cached_ones(
    open_page: OpenPage, url: str
) -> None:
    with open_page(f"{url}/#dashboard") as page:
        page.locator("#connection.live").wait_for()
        places = page.evaluate("""async () => {
            const { Chart } = await import("/page/chart.js");
            const series = [{ name: "generated", style: "s1" }, { name: "cached", style: "s2" }];
            const chart = new Chart("Tokens", series, String, { logarithmic: true });
            document.getElementById("charts").append(chart.root);
            for (const time of [0, 1]) chart.add(time, [20, 20000]);
            return [...chart.root.querySelectorAll("path")].map((path) => path.getBBox().y);
        }""")
        floor, height = 132, 124
        generated, cached = ((floor - place) / height for place in places)
        assert 0.2 < generated < cached - 0.3 <= 0.7


def test_the_picture_is_walked_and_zoomed_with_the_keyboard(open_page: OpenPage, url: str) -> None:
    stem = "a harbour book " * 100
    for end in ("one", "two"):
        body = {"prompt": stem + f"{end} " * 300}
        httpx.post(f"{url}/v1/cache/warm", json=body, timeout=20)
    with open_page(f"{url}/#cache") as page:
        page.get_by_role("treeitem", name=re.compile("a harbour book")).first.wait_for()
        page.get_by_role("treeitem", name="Whole cache").click()
        assert page.locator(".continuations li").count() >= 1
        for _ in range(100):  # to the stem: its first row, along the siblings
            name = page.evaluate("document.activeElement.getAttribute('aria-label')")
            if name.startswith("a harbour book"):
                break
            page.keyboard.press("ArrowDown" if name.startswith(("Whole", "No key")) else "ArrowRight")  # fmt: skip
        page.keyboard.press("ArrowDown")
        level = page.evaluate("document.activeElement.ariaLevel")
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.ariaLevel") == str(int(level) - 1)
        page.keyboard.press("Enter")
        page.locator("#details").wait_for()
        page.keyboard.press("Enter")
        page.locator("#path li").nth(1).wait_for()
        zoomed = page.locator(".cell").first
        assert "a harbour book" in zoomed.inner_text()
        page.wait_for_timeout(1200)  # the stream goes on below the node
        page.keyboard.press("Escape")
        page.get_by_role("treeitem", name="Whole cache").wait_for()


def test_a_key_is_asked_for_and_kept_for_the_tab(
    open_page: OpenPage, start_server: StartServer
) -> None:
    with open_page(start_server(api_key="secret").url) as page:
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        dialog.get_by_text("does not know this key").wait_for()
        dialog.get_by_label("Key").fill("secret")
        dialog.get_by_role("button", name="Use this key").click()
        page.locator("#connection.live").wait_for()
        page.reload()
        page.locator("#connection.live").wait_for()
        assert "tokens/s" in ask(page, "Hi")
        assert page.evaluate("Object.values(localStorage).join()").find("secret") == -1
