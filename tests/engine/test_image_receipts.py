"""Receipts of answers about images: equal however an answer was computed, and bound to each image."""

import asyncio
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.cli import verify
from radixrt.cli.main import main
from radixrt.cli.verify import read_images, recomputed, verdict
from radixrt.client.open_requests import OpenRequest
from radixrt.messages.calls import FlushCacheCall, StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.prompt_images import images_of
from radixrt.messages.receipts import VERSION_WITH_IMAGES, Parameters, Receipt
from radixrt.messages.requests import ChatPrompt, GenerateRequest, PartialAnswer, RequestOptions
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare
from radixrt.tokenizer.answer.answer_state import AnswerState
from radixrt.tokenizer.images.fetching import ImageFetcher
from tests.checkpoints.image_checkpoints import make_image_checkpoint, picture, png, user
from tests.engine.test_receipts import EXAMPLE
from tests.servers.engine_in_threads import engines_in_threads

POOL_TOKENS = 512
"""Three chats overflow such a pool."""
ONE, OTHER = picture(1, 56, 42), picture(5, 56, 42)
SMALL = picture(3, 28, 90)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = "One document, many questions: the first pays for the document. "


class Answering:
    """An engine that gives receipts."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = make_image_checkpoint(family, folder)
        config = ServerConfig(
            model_path=str(self.folder),
            page_size=4,
            max_total_tokens=POOL_TOKENS,
            receipts=True,
            log_level="warning",
        )
        with engines_in_threads():
            self.engine = BackgroundEngine(prepare(config))
        self._count = 0

    def receipts(
        self,
        *chats: dict[str, Any],
        sampling: SamplingParams = GREEDY,
        options: RequestOptions | None = None,
    ) -> list[list[Receipt]]:
        """Of chats of one message, asked at the same time: the receipts of their answers."""

        async def answer(chat: dict[str, Any]) -> list[Receipt]:
            self._count += 1
            request = GenerateRequest(
                request_id=f"{self._count}",
                prompt=ChatPrompt([chat]),
                options=options or RequestOptions(sampling=sampling),
                receipt=True,
            )
            chunks = [one async for one in self.engine.client.generate(request)]
            found = {one.index: one.receipt for one in chunks if one.receipt is not None}
            return [found[index] for index in range(sampling.n)]

        async def answers() -> list[list[Receipt]]:
            return await asyncio.gather(*map(answer, chats))

        return self.engine.run(answers())

    def receipt(self, *parts: str | Image.Image) -> Receipt:
        ((found,),) = self.receipts(user(*parts))
        return found

    def flush(self) -> None:
        self.engine.run(self.engine.client.call(FlushCacheCall()))

    def again(self, receipt: Receipt, *images: Image.Image) -> Receipt:
        """Computed from the receipt and images."""
        parts = images_of(ChatPrompt([user(*images)]))
        self._count += 1
        return recomputed(self.engine, receipt, parts)


def digests(receipt: Receipt) -> list[str]:
    assert isinstance(receipt.images, list)
    return receipt.images


def made(receipt: Receipt, images: list[str]) -> Receipt:
    """A receipt that says the same of other images."""
    return Receipt.make(
        receipt.engine, receipt.settings, receipt.prompt_ids, receipt.parameters, receipt.token_ids, images
    )  # fmt: skip


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl"])
def answering(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Answering]:
    """Whole images, and images of their own sizes with positions in three axes."""
    answering = Answering(request.param, tmp_path_factory.mktemp(request.param))
    yield answering
    answering.engine.close()


def test_receipts_are_equal_cold_warm_evicted_and_batched(answering: Answering) -> None:
    chats = [
        user(f"{number} {LONG}", ONE, " or ", picture(number, 30, 50 + 9 * number), LONG)
        for number in range(5, 8)
    ]
    cold = []
    for chat in chats:
        answering.flush()
        cold += answering.receipts(chat)
    assert len({one.chain[-1] for (one,) in cold}) == len(chats)
    assert answering.receipts(chats[-1]) == cold[-1:], "warm"
    for _ in range(2):
        for chat, expected in zip(chats, cold, strict=True):
            assert answering.receipts(chat) == [expected], "evicted in between"
    stats = answering.engine.run(answering.engine.client.call(StatsCall()))
    assert stats.evicted_pages and stats.cached_tokens
    assert answering.receipts(*chats, *chats[:2]) == [*cold, *cold[:2]], "batched"


def test_each_answer_of_a_request_has_its_own_receipt_about_the_same_images(
    answering: Answering,
) -> None:
    sampling = SamplingParams(max_tokens=8, n=2, seed=5)
    ((first, second),) = answering.receipts(user(ONE, "What?"), sampling=sampling)
    assert first.chain[:4] == second.chain[:4] and first.chain[-1] != second.chain[-1]
    assert first.images == second.images and first.version == VERSION_WITH_IMAGES
    for receipt in (first, second):
        assert answering.again(receipt, ONE) == receipt


def test_a_receipt_is_of_its_images_in_their_order(answering: Answering) -> None:
    changed = ONE.copy()
    changed.putpixel((30, 20), (1, 2, 3))
    receipt = answering.receipt("First ", ONE, " then ", OTHER, "?")
    assert len(set(digests(receipt))) == 2
    for first, second in ((OTHER, ONE), (changed, OTHER), (ONE, ONE)):
        other = answering.receipt("First ", first, " then ", second, "?")
        assert len(digests(other)) == 2
        assert other.prompt_ids == receipt.prompt_ids, "the model's ids do not tell them apart"
        assert other.chain[:3] == receipt.chain[:3]
        assert not set(other.chain[3:]) & set(receipt.chain[3:])
    example = runpy.run_path(str(EXAMPLE))
    assert example["chain_of"](msgspec.to_builtins(receipt, str_keys=True)) == receipt.chain


def test_an_answer_is_verified_with_its_images_alone(answering: Answering) -> None:
    receipt = answering.receipt("First ", ONE, " then ", OTHER, "?")
    here = answering.again(receipt, ONE, OTHER)
    assert verdict(receipt, here) == (["equal: 12 tokens, and the engine is the same"], True)
    sentences, same = verdict(receipt, answering.again(receipt, OTHER, ONE))
    assert not same
    assert [one[14:21] for one in sentences[:2]] == ["image 1", "image 2"]
    assert re.match(r"different: token \d+ of the answer", sentences[2])
    sentences, same = verdict(receipt, answering.again(receipt, ONE, ONE))
    assert not same and f"image 2, {digests(receipt)[1][:12]} in the receipt" in sentences[0]
    forged = made(receipt, digests(receipt)[::-1])
    forged.check()
    sentences, same = verdict(forged, answering.again(forged, ONE, OTHER))
    assert not same and len(sentences) == 3 and sentences[-1].startswith("equal: 12 tokens, but")


@pytest.mark.parametrize("answering", ["qwen2_5_vl"], indirect=True)
def test_an_image_of_another_size_is_named(answering: Answering) -> None:
    receipt = answering.receipt(ONE, " or ", OTHER, "?")
    with pytest.raises(RequestError, match=r"Image 2 has the digest .* another file") as refused:
        answering.again(receipt, ONE, SMALL)
    assert "Image 1" not in refused.value.message


@pytest.mark.parametrize("answering", ["qwen2_5_vl"], indirect=True)
def test_an_answer_about_fetched_images_that_goes_on_has_no_receipt(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine fetches them again: another file may lie there by then."""
    site = [png(ONE)]
    monkeypatch.setattr(ImageFetcher, "fetch", lambda *_: site[0])
    chat = {"role": "user", "content": [{"type": "image", "url": "https://a.test/"}]}
    ((receipt,),) = answering.receipts(chat)
    assert answering.again(receipt, ONE) == receipt
    site[0], message = png(OTHER), OpenRequest.message
    begun = [PartialAnswer(pack_ids(receipt.token_ids[:6]))]
    monkeypatch.setattr(
        OpenRequest, "message", lambda self: msgspec.structs.replace(message(self), resumed=begun)
    )
    with pytest.raises(KeyError):
        answering.receipts(chat)
    ((of_data,),) = answering.receipts(user(ONE))
    assert of_data == receipt, "which its message holds"


@pytest.mark.parametrize("answering", ["qwen2_5_vl"], indirect=True)
def test_the_next_turn_of_a_chat_with_images_is_not_begun(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its tokens would be settled, and its images would be fetched again."""
    begun: list[GenerateRequest | None] = []
    next_turn = AnswerState.next_turn

    def watched(answer: AnswerState) -> GenerateRequest | None:
        begun.append(next_turn(answer))
        return begun[-1]

    monkeypatch.setattr(AnswerState, "next_turn", watched)
    options = RequestOptions(sampling=GREEDY, prepares_next_turn=True)
    for chat in (user(ONE), {"role": "user", "content": "Hi"}):
        answering.receipts(chat, options=options)
    assert [one is None for one in begun] == [True, False]


@pytest.mark.parametrize("answering", ["qwen2_5_vl"], indirect=True)
def test_the_command_takes_the_files_in_the_order_of_the_prompt(
    answering: Answering, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    receipt = answering.receipt(ONE, " or ", SMALL, "?")
    content = [
        msgspec.to_builtins(one, str_keys=True) for one in (receipt, answering.receipt("Hi"))
    ]
    (tmp_path / "receipt.json").write_text(json.dumps(content))
    files = {"a.png": ONE, "b.png": SMALL}
    for name, image in files.items():
        image.save(tmp_path / name)

    def verified(*names: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
        line = ["verify", str(tmp_path / "receipt.json"), "--model-path", str(answering.folder)]
        line += flags
        for name in names:
            line += ["--image", str(tmp_path / name)]
        with engines_in_threads(), pytest.raises(SystemExit) as ended:
            main(line)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    status, output = verified("a.png", "b.png")
    assert status == 0 and output.count("and the engine is the same") == 2, output
    status, output = verified("b.png", "a.png")
    assert status == 1 and "Image 1 has the digest" in output and "Image 2" in output
    assert "and the engine is the same" in output, "of the receipt of text"
    status, output = verified("a.png", "b.png", flags=("--max-image-pixels", "2400"))
    assert status == 1 and "Image 2 may have at most 2400 pixels" in output
    for names in ((), ("a.png",), ("a.png", "b.png", "b.png")):
        status, output = verified(*names)
        assert status and f"Images of the receipt: 2; given: {len(names)}." in output
    status, output = verified("a.png", "none.png")
    assert status and "none.png" in output
    (tmp_path / "empty.png").touch()
    status, output = verified("a.png", "empty.png")
    assert status and "empty.png must be" in output


def test_the_command_serves_as_the_server_of_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many images as the receipt has, and the user's flags about them."""
    forged = Receipt.make({}, {}, [1], Parameters(sampling=GREEDY), [2], ["ab"] * 70)
    (tmp_path / "receipt.json").write_bytes(msgspec.json.encode(forged))
    ONE.save(tmp_path / "a.png")
    served: list[ServerConfig] = []

    def prepared(config: ServerConfig) -> ServerConfig:
        served.append(config)
        raise RequestError("this is enough")

    monkeypatch.setattr(verify, "prepare", prepared)
    line = ["verify", str(tmp_path / "receipt.json"), "--model-path", "a", "--mmproj", "tower.gguf", "--max-image-pixels", "9"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*line, *["--image", str(tmp_path / "a.png")] * 70])
    assert ended.value.code == 1
    (config,) = served
    assert (config.max_images, config.mmproj, config.max_image_pixels) == (70, "tower.gguf", 9)


def test_receipts_of_other_images_are_verified_alone() -> None:
    """And those of text take no image."""
    text = Receipt.make({}, {}, [1], Parameters(sampling=GREEDY), [2])
    with pytest.raises(ConfigError, match="different images"):
        read_images(["a"], [made(text, ["a"]), text, made(text, ["b"])])
    with pytest.raises(ConfigError, match="Images of the receipt: 0; given: 1"):
        read_images(["a"], [text])
    assert read_images([], [text]) == []
