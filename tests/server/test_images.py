"""Images through the front door, with the clients that people use."""

import base64
import functools
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.checkpoints.image_checkpoints import make_image_checkpoint, picture, png
from tests.server.test_takeover import Stream, commands_of, process_of, until
from tests.servers import Server, serving

QUESTION = "What is in this picture?"
LARGE = 420
"""Pixels of a side of an image whose tensor is in a file."""
QUESTION_PART = {"type": "text", "text": QUESTION}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_image_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = LARGE * LARGE
    file.write_text(json.dumps(settings))
    flags = ("--served-model-name", "tiny", "--page-size", "4", "--log-level", "warning")
    with serving(folder, *flags, "--receipts") as server:
        yield server


def of_image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def chat(server: Server, *parts: str | dict[str, Any], **fields: Any) -> httpx.Response:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 6,
        "temperature": 0,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_every_client_sends_an_image_and_shares_its_pages(seeing: Server) -> None:
    data = png(picture(11))
    options = {"temperature": 0, "num_predict": 6}
    first = chat(seeing, of_image(data), QUESTION)
    assert first.status_code == 200, first.text
    text = first.json()["choices"][0]["message"]["content"]
    usage = first.json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 20
    assert usage["prompt_tokens"] > 20 and not usage["prompt_tokens_details"]["cached_tokens"]
    url = f"data:image/png;base64,{data}"
    openai_client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0)
    of_responses = openai_client.responses.create(
        model="tiny",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                    {"type": "input_text", "text": QUESTION},
                ],
            }
        ],
        max_output_tokens=6,
        temperature=0,
    )
    assert of_responses.output_text == text
    assert of_responses.usage is not None
    cached = {of_responses.usage.input_tokens_details.cached_tokens}
    of_anthropic = anthropic.Anthropic(base_url=seeing.url, api_key="unused").messages.create(
        model="tiny",
        max_tokens=6,
        extra_body={"temperature": 0},
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": data},
                    },
                    {"type": "text", "text": QUESTION},
                ],
            }
        ],
    )
    assert of_anthropic.content[0].type == "text" and of_anthropic.content[0].text == text
    cached.add(of_anthropic.usage.cache_read_input_tokens or 0)
    client = ollama.Client(host=seeing.url)
    message = {"role": "user", "content": QUESTION, "images": [data]}
    of_ollama = client.chat("tiny", messages=[message], options=options)
    assert of_ollama.message.content == text
    of_prompt = client.generate("tiny", prompt=QUESTION, images=[data], options=options)
    assert of_prompt.response == text
    again = chat(seeing, of_image(data), QUESTION)
    cached.add(again.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == {(usage["prompt_tokens"] - 1) // 4 * 4}


def test_a_text_only_model_says_what_it_lacks(demo_server: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": [of_image(png(picture(1)))]}]}
    response = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "has no vision tower" in response.json()["error"]["message"]


def header_of(width: int, height: int) -> str:
    """A PNG of a few bytes whose header names a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        code = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", code)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def animated(form: str) -> str:
    file = io.BytesIO()
    frames = [picture(one) for one in range(3)]
    frames[0].save(file, form, save_all=True, append_images=frames[1:])
    return base64.b64encode(file.getvalue()).decode()


SVG = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>').decode()
WHOLE = png(picture(5, 80, 60))

REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a huge header": (of_image(header_of(65535, 65535)), 413, "pixels"),
    "a long strip": (of_image(header_of(40000, 1)), 413, "on a side"),
    "a strip that the processor refuses": (of_image(png(picture(1, 900, 3))), 400, "can't be prepared"),
    "a false header": (of_image(header_of(4000, 4000)), 400, "can't be decoded"),
    "truncated": (of_image(WHOLE[: len(WHOLE) // 2 // 4 * 4]), 400, "can't be decoded"),
    "animated WebP": (of_image(animated("WEBP")), 400, "animated WEBP"),
    "animated GIF": (of_image(animated("GIF")), 400, "animated GIF"),
    "animated PNG": (of_image(animated("PNG")), 400, "animated PNG"),
    "an SVG as PNG": (of_image(SVG), 400, "the format SVG"),
    "an SVG": ({"type": "image_url", "image_url": {"url": f"data:image/svg+xml;base64,{SVG}"}}, 400, "SVG"),
    "a TIFF": (of_image(png(picture(1), "TIFF")), 400, "the format TIFF"),
    "no base64": (of_image("%%%%"), 400, "not valid base64"),
    "empty": (of_image(""), 400, "must be a string with an image"),
    "a web address": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, 400, "fetches no images"),
    "a secure web address": ({"type": "image_url", "image_url": {"url": "https://169.254.169.254/a.png"}}, 400, "fetches no images"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400, "fetches no images"),
    "no url": ({"type": "image_url", "image_url": {}}, 400, "data URL"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_images_are_refused(seeing: Server, name: str) -> None:
    part, status, words = REFUSED[name]
    response = chat(seeing, part, QUESTION)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


def test_too_many_images_are_refused(seeing: Server) -> None:
    response = chat(seeing, *[of_image(png(picture(1)))] * 65)
    assert response.status_code == 400 and "65 images" in response.json()["error"]["message"]


def test_ten_turns_about_an_image_run_the_tower_once(seeing: Server) -> None:
    before = seeing.info()["stats"]["images_computed"]
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [of_image(png(picture(77))), {"type": "text", "text": QUESTION}],
        }
    ]
    for turn in range(10):
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"] | {"role": "assistant"})
        messages.append({"role": "user", "content": f"And {turn}?"})
        if turn == 4:
            httpx.post(f"{seeing.url}/flush_cache")
    assert seeing.info()["stats"]["images_computed"] == before + 1
    assert len(commands_of(seeing, "tokenizer.images.preparing")) == 1, "one for all"


def test_an_image_of_an_expected_prompt_is_seen_in_idle_time(seeing: Server) -> None:
    parts = [of_image(png(picture(41))), QUESTION_PART]
    before = seeing.info()["stats"]["images_computed"]
    body = {"messages": [{"role": "user", "content": parts}], "priority": "idle"}
    warmed = httpx.post(f"{seeing.url}/v1/cache/warm", json=body, timeout=60)
    assert warmed.status_code == 200, warmed.text
    usage = chat(seeing, *parts).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 20
    assert seeing.info()["stats"]["images_computed"] == before + 1


def test_the_explanation_names_the_image(seeing: Server) -> None:
    text = "Compare these: "
    one, two, other = (of_image(png(picture(seed))) for seed in (21, 22, 23))
    assert chat(seeing, text, one, two, QUESTION).status_code == 200
    answer = chat(seeing, text, one, other, QUESTION, cache={"explain": True}).json()
    assert "Image 2" in str(answer)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_answers_about_images_survive_the_worker(seeing: Server) -> None:
    """The last test of the server: a new engine gets the images with the requests that go on. One
    has its first tokens; the tower works on the other's, whose tensor is in a file."""
    begun, large = (
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [of_image(png(image)), QUESTION_PART]}],
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "receipt": True,
        }
        for image, count in ((picture(31), 600), (picture(51, LARGE, LARGE), 24))
    )
    worker = process_of(seeing, "worker")
    line, maps = worker.cmdline(), Path(f"/proc/{worker.pid}/maps")
    run_dir = Path(line[line.index("--run-dir") + 1])
    cut = [Stream(seeing, begun), Stream(seeing, large)]
    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(cut[0].run)]
        until(lambda: cut[0].num_events > 20)
        reading.append(threads.submit(cut[1].run))
        until(lambda: "/image-" in maps.read_text(), pause_s=0.001)
        worker.kill()
        assert not cut[0].finish, "both are cut off"
        for one in reading:
            one.result()
    assert process_of(seeing, "worker") != worker
    assert not cut[0].error and not cut[1].error
    computed = seeing.info()["stats"]["images_computed"]
    httpx.post(f"{seeing.url}/flush_cache")
    whole = [Stream(seeing, body).run() for body in (begun, large)]
    assert [one.texts for one in cut] == [one.texts for one in whole]
    assert [one.receipts for one in cut] == [one.receipts for one in whole]
    assert all(len(one.texts[0]) and len(one.receipts[0]["images"]) == 1 for one in whole)
    assert cut[1].usage["prompt_tokens_details"]["image_tokens"] == 900
    assert computed == seeing.info()["stats"]["images_computed"] == 2, "by the new worker"
    assert not list(run_dir.rglob("image-*.*")), "workers' names are removed"


thorough = pytest.mark.skipif(
    "RADIXRT_DETERMINISM" not in os.environ, reason="make determinism runs it"
)


@thorough
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_ranks_answer_about_images_like_one(tmp_path: Path, family: str) -> None:
    """Each rank has the whole tower."""
    folder = make_image_checkpoint(family, tmp_path)
    flags = ("--served-model-name", "tiny", "--page-size", "4", "--dtype", "float32")
    texts = set()
    for ranks in ("1", "2"):
        with serving(folder, *flags, "--tp", ranks, "--log-level", "warning") as server:
            parts = (of_image(png(picture(8))), "or", of_image(png(picture(9, 20, 50))), QUESTION)
            answers = [chat(server, *parts, max_tokens=24, ignore_eos=True) for _ in range(2)]
            assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
            texts |= {one.json()["choices"][0]["message"]["content"] for one in answers}
    assert len(texts) == 1 and texts.pop()


def has_events(stream: Stream, least: int) -> bool:
    return stream.num_events > least


@thorough
def test_another_replica_goes_on_with_an_answer_about_an_image(tmp_path: Path) -> None:
    """Each of two workers dies once in an answer; the other replica gets the image too."""
    folder = make_image_checkpoint("qwen3_vl", tmp_path)
    flags = ("--served-model-name", "tiny", "--page-size", "4", "--log-level", "warning")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [of_image(png(picture(31))), QUESTION_PART]}],
        "max_tokens": 600,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with serving(folder, *flags, "--dp", "2") as server, ThreadPoolExecutor(1) as threads:
        whole = Stream(server, body).run()
        cut = Stream(server, body)
        reading = threads.submit(cut.run)
        for number, worker in enumerate(list(commands_of(server, "worker")), 1):
            until(functools.partial(has_events, cut, 100 * number))
            worker.kill()
        reading.result()
        assert whole.texts[0] and not cut.error and cut.texts == whole.texts
