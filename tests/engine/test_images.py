"""Images in the engine: their features are those of transformers, and prefixes with images are
cached like text."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.layers.linear import ColumnParallelLinear, RowParallelLinear
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.images import SHORTEST_PAGE, DropImage, VisionInfo, image_key_ids
from radixrt.messages.prompt_images import images_of
from radixrt.messages.requests import ChatPrompt, PoolingRequest, RequestOptions, TokenPrompt
from radixrt.messages.sequences import SequenceRequest
from radixrt.models.loader import load_model
from radixrt.models.mtp import MtpHead
from radixrt.models.vision import tower
from radixrt.models.vision.sees import ImageRows
from radixrt.scheduler.sequence import Sequence
from radixrt.tokenizer.images import tensor_file
from radixrt.tokenizer.images.kept_images import KeptImages
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.processor import ImageProcessor
from radixrt.tokenizer.prompt.prompts import (
    EncodedPrompt,
    PromptEncoder,
    shows_images,
    size_in_chars,
)
from radixrt.worker.image_positions import ImagePart
from radixrt.worker.threads import use_threads
from tests.checkpoints.draft_heads import watch_drafts
from tests.checkpoints.image_checkpoints import (
    FAMILIES,
    OTHER_TEXTS,
    SPECIAL,
    TILE,
    VOCAB_SIZE,
    make_image_checkpoint,
    picture,
    png,
    user,
)
from tests.checkpoints.mtp_checkpoints import add_mtp
from tests.engine.in_process import GREEDY, InProcessEngine
from tests.engine.seeing import LIMITS, Chat, Sees

THOROUGH = "RADIXRT_DETERMINISM" in os.environ
EVERY = PoolingRequest(logits_of=tuple(range(VOCAB_SIZE)))

SOME = FAMILIES if THOROUGH else ["llava", "gemma3", "qwen3_vl", "qwen3_5"]
"""One of each kind: plain, whole images, positions in three axes, recurrent layers."""
TWO = FAMILIES if THOROUGH else ["gemma3", "qwen3_5"]
"""Whole images; positions in three axes, and recurrent layers."""

LOAD_ORDER = ProcessedImage.load_order


def tensor_of(image: ProcessedImage) -> np.ndarray:
    """The tensor of a small image."""
    return np.frombuffer(image.pixels, dtype="<f4").reshape(image.shape).copy()


@pytest.fixture(scope="module", params=FAMILIES)
def sees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return Sees(request.param, tmp_path_factory.mktemp(request.param))


CHATS: dict[str, Chat] = {
    "one before text": [user(picture(1), "What is in this picture?")],
    "one behind text": [user("Look at this: ", picture(2, 90, 31))],
    "four of different sizes, between text": [
        user("First ", picture(1), " then ", picture(2, 20, 60), picture(3, 64, 64), " or "),
        {"role": "assistant", "content": "A radix tree."},
        user("And this?", picture(4, 300, 20)),
    ],
}


@pytest.mark.parametrize("sees", [*FAMILIES, *OTHER_TEXTS], indirect=True)
@pytest.mark.parametrize("name", CHATS)
def test_logits_are_those_of_transformers(sees: Sees, name: str) -> None:
    chat = CHATS[name]
    engine = sees.engine()
    prompt = sees.encode(chat)
    ids, logits = sees.reference(chat)
    assert prompt.token_ids == ids
    (found,) = engine.pool([prompt], EVERY)
    assert np.abs(found - logits).max() < 1e-4


@pytest.mark.parametrize("sees", [*FAMILIES, *OTHER_TEXTS], indirect=True)
def test_answers_behind_images_are_those_of_transformers(sees: Sees) -> None:
    """Decoded tokens have the positions that the images leave, in an answer that goes on elsewhere
    and in the next turn too."""
    chat = CHATS["four of different sizes, between text"]
    prompt, engine = sees.encode(chat), sees.engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    (answer,) = engine.generate([prompt], sampling)
    assert answer == sees.reference_answer(chat, 12)
    for taken in (engine, sees.engine()):
        assert taken.generate_from(prompt, answer[:5], sampling) == answer[5:]
    chat = [*chat, {"role": "assistant", "content": "Yes."}, user("What is behind it?")]
    (found,) = engine.pool([sees.encode(chat)], EVERY)
    assert np.abs(found - sees.reference(chat)[1]).max() < 1e-4
    assert engine.scheduler.stats(0).cached_tokens > prompt.images[-1].start


def logits_of(engine: InProcessEngine, prompt: EncodedPrompt) -> np.ndarray:
    return engine.pool([prompt], EVERY)[0]


LONG = "One document, many questions: the first pays for the document. "
THREE: Chat = [
    user(LONG, picture(1), LONG, picture(2, 20, 60), picture(3, 64, 64), " What is this?")
]


@pytest.mark.parametrize("chunk", [16, 40] if THOROUGH else [16])
def test_chunks_change_no_bit(sees: Sees, chunk: int) -> None:
    engine = sees.engine()
    prompt = sees.encode(THREE)
    whole = logits_of(engine, prompt)
    assert np.abs(whole - sees.reference(THREE)[1]).max() < 1e-4
    chunked = sees.engine(chunked_prefill_size=chunk, max_prefill_tokens=chunk)
    assert (logits_of(chunked, prompt) == whole).all()


def test_hits_before_at_and_inside_an_image_change_no_bit(sees: Sees) -> None:
    """A shorter prompt leaves pages up to a place. The longer one goes on from there, or from the
    beginning of an image whose tokens see one another."""
    prompt = sees.encode(THREE)
    cold = logits_of(sees.engine(), prompt)
    first = prompt.images[0]
    places = {
        "before": first.start - 3,
        "start": -(-first.start // 8) * 8 + 1,
        "inside": first.start + first.num_tokens // 2,
        "end": first.start + first.num_tokens + 9,
    }
    for place, end in places.items():
        engine = sees.engine()
        engine.generate([shortened(prompt, end)], PREFILL_ONLY)
        assert (logits_of(engine, prompt) == cold).all(), place
        cached, is_whole = (end - 1) // 8 * 8, engine.info.vision.whole_images
        if is_whole and first.start < cached < first.start + first.num_tokens:
            cached = first.start
        assert engine.scheduler.stats(0).cached_tokens == cached, place


@pytest.mark.parametrize("sees", ["gemma3"], indirect=True)
def test_no_step_splits_an_image_whose_tokens_see_one_another(
    sees: Sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where requests go on from pages that others compute at the same time."""
    image = picture(1)
    prompts = [
        sees.encode([user(LONG[start:], LONG, image, image, end)])
        for start in range(4)
        for end in ("What?", "Why?", "Who else is there?")
    ]
    engine = sees.engine(chunked_prefill_size=40, max_prefill_tokens=40)
    images, parts = engine.runner.images, set()
    assert images is not None
    rows = images.rows

    def watched(step: list[ImagePart]) -> ImageRows:
        parts.update((part.first, part.num_tokens) for part in step)
        return rows(step)

    monkeypatch.setattr(images, "rows", watched)
    engine.generate(prompts)
    assert parts == {(0, prompts[0].images[0].num_tokens)}


@pytest.mark.parametrize("sees", ["qwen3_vl"], indirect=True)
def test_tensors_in_files_change_no_bit(
    sees: Sees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "MAX_SENT_BYTES", 0)
    monkeypatch.setattr(
        ProcessedImage, "load_order", functools.partialmethod(LOAD_ORDER, by_file=True)
    )
    placed = sees.encoder(tmp_path).encode(ChatPrompt(THREE), LIMITS)
    assert len(list(tmp_path.iterdir())) == 3
    found = logits_of(sees.engine(), placed)
    assert (found == logits_of(sees.engine(), sees.encode(THREE))).all()
    assert len(list(tmp_path.iterdir())) == 3, "workers have read the others"


def test_texts_with_the_tokens_of_images_are_texts(sees: Sees) -> None:
    """A client writes about them. The placeholders are those of its image alone."""
    words = f" I write {' and '.join(SPECIAL[sees.family])} here. "
    prompt = sees.encode([user(words, picture(1), words)])
    (tokens,) = {sum(run.num_tokens for run in prompt.images), prompt.pictures[0].num_tokens}
    ids, keys = np.array(prompt.token_ids), unpack_ids(prompt.key_ids)
    assert (ids == sees.vision.image_token).sum() == (keys < 0).sum() == tokens
    for run in prompt.images:
        assert (ids[run.start : run.start + run.num_tokens] == sees.vision.image_token).all()
    assert prompt.text is not None and prompt.text.count(words) == 2


def test_tokens_with_their_images_are_the_prompt_of_the_chat(sees: Sees) -> None:
    """The placeholders say where each image is; others than those of the images are refused."""
    chat = CHATS["four of different sizes, between text"]
    placed = sees.encode(chat)
    images = [dict(part) for part in images_of(ChatPrompt(chat))]
    ids, run = placed.token_ids, placed.images[1]

    def encode(ids: list[int], images: list[dict[str, Any]] = images) -> EncodedPrompt:
        prompt = TokenPrompt(pack_ids(ids), images)
        assert shows_images(prompt)
        assert size_in_chars(prompt) > len(ids) + sum(len(one["data"]) for one in images)
        return sees.encoder().encode(prompt, LIMITS)

    again = encode(ids)
    assert (again.token_ids, again.key_ids, again.images) == (ids, placed.key_ids, placed.images)
    assert [one.key for one in again.pictures] == [one.key for one in placed.pictures]
    torn = [*ids[: run.start + 1], 5, *ids[run.start + 1 :]]
    images[1]["digest"], images[0]["digest"] = "0" * 64, placed.pictures[0].key.hex()
    for other, shown in ((torn, images), (ids[: run.start] + ids[run.start + 1 :], images), (ids, images[:2])):  # fmt: skip
        with pytest.raises(
            RequestError, match=r"placeholders are not those of its images"
        ) as refused:
            encode(other, shown)
        assert "Image 2 has the digest" in refused.value.message
        assert "Image 1" not in refused.value.message
    with pytest.raises(RequestError, match="This model sees none"):
        blind = PromptEncoder(sees.vocabulary)
        blind.serve_images(None, "This model sees none.")
        blind.encode(TokenPrompt(pack_ids(ids), images), LIMITS)


@pytest.mark.parametrize("sees", ["llava", "qwen3_vl"], indirect=True)
def test_an_answer_with_the_token_of_images_is_named_as_the_cause(sees: Sees) -> None:
    """A model may write it, and its answer comes back as the tokens that it wrote."""
    question = user("Draw a picture.")
    first = sees.encode([question])
    assert first.text is not None
    image_token = sees.vision.image_token
    sees.vocabulary.segments.answers.keep(first.text, "Here:", [5, image_token, 6], BASE_ROOT)
    chat = [question, {"role": "assistant", "content": "Here:"}]
    again = sees.encode([*chat, user("Thanks.")])
    assert image_token in again.token_ids and not again.images, "without images it is a token"
    with pytest.raises(RequestError, match=r"An earlier answer .* the model's token for images"):
        sees.encode([*chat, user("And this?", picture(1))])


def shortened(prompt: EncodedPrompt, end: int) -> EncodedPrompt:
    """The first tokens of a prompt."""
    runs = [
        msgspec.structs.replace(run, num_tokens=min(run.num_tokens, end - run.start))
        for run in prompt.images
        if run.start < end
    ]
    return prompt._replace(
        token_ids=prompt.token_ids[:end], key_ids=prompt.key_ids[: 4 * end], images=runs
    )


def test_one_other_value_shares_no_page_from_the_image_on(sees: Sees) -> None:
    changed, last = picture(2, TILE, TILE), (TILE - 1, TILE - 1)
    changed.putpixel(last, (changed.getpixel(last)[0] ^ 1, 0, 0))  # type: ignore[index]
    engine = sees.engine()
    chats = [[user(LONG, one, LONG)] for one in (picture(2, TILE, TILE), changed)]
    one, other = map(sees.encode, chats)
    assert one.token_ids == other.token_ids and one.key_ids != other.key_ids
    of_image = [key for key in unpack_ids(one.key_ids).tolist() if key < 0]
    assert len(set(of_image)) == one.pictures[0].num_tokens, "each placeholder has its own"
    cold = logits_of(sees.engine(), other)
    logits_of(engine, one)
    before = engine.scheduler.stats(0).cached_tokens
    assert (logits_of(engine, other) == cold).all()
    shared = engine.scheduler.stats(0).cached_tokens - before
    before_image = one.images[0].start // 8 * 8
    if engine.info.state_bytes:  # of recurrent layers, kept at the ends of prompts
        assert shared <= before_image
    else:
        assert shared == before_image > 0


@pytest.mark.parametrize("sees", SOME, indirect=True)
def test_other_settings_of_the_processor_share_no_id(sees: Sees, tmp_path: Path) -> None:
    """Nor do other weights of the tower."""
    vision = sees.engine().info.vision
    assert vision is not None
    data = png(picture(1))

    def processed(folder: Path, vision: VisionInfo = vision) -> ProcessedImage:
        return KeptImages(folder, vision).process(data, "Image 1")

    def with_setting(name: str, value: object) -> Path:
        """The checkpoint's processor with another setting."""
        folder = tmp_path / name
        processor = transformers.AutoImageProcessor.from_pretrained(sees.folder, backend="pil")
        setattr(processor, name, value)
        processor.save_pretrained(folder)
        return folder

    alike = processed(sees.folder)
    other_scale = processed(with_setting("rescale_factor", 1 / 128))
    other_weights = processed(sees.folder, msgspec.structs.replace(vision, weights=bytes(32)))
    unread = processed(with_setting("size_divisor", 1))  # which this processor does not read
    assert alike.pixels == other_weights.pixels == unread.pixels != other_scale.pixels
    for other in (other_scale, other_weights, unread):
        assert not set(alike.key_ids.tolist()) & set(other.key_ids.tolist())


@pytest.mark.parametrize("sees", ["llava"], indirect=True)
def test_an_image_is_known_by_all_of_its_file_and_its_tensor(sees: Sees) -> None:
    """The first characters of a file, and values without their shape, are those of other images
    too."""
    kept = KeptImages(sees.folder, sees.vision)
    image = picture(3, TILE, TILE)
    files = [png(image, "BMP")]
    image.putpixel((0, 0), (1, 2, 3))  # in the last bytes of such a file
    files.append(png(image, "BMP"))
    assert files[0][:1000] == files[1][:1000]
    first, second = (kept.process(file, "") for file in files)
    assert first.key != second.key
    values = tensor_of(first)
    flatter = values.reshape(*values.shape[:-2], TILE // 2, 2 * TILE)
    processor = ImageProcessor(sees.folder, sees.vision)
    assert processor.key(values) == first.key != processor.key(flatter)


def test_the_tower_computes_few_rows_in_a_piece(
    sees: Sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pieces, the same work and features."""
    images = sees.engine().runner.images
    assert images is not None and images.model.vision is not None
    vision = images.model.vision
    tensors = [torch.from_numpy(tensor_of(one)) for one in sees.encode(THREE).pictures]
    work: list[tuple[int, int]] = []
    """Rows and products of the calls since the last rest."""

    def watch(layer: Any) -> None:
        forward = layer.forward

        def watched(self: Any, rows: torch.Tensor) -> torch.Tensor:
            work.append((len(rows), len(rows) * self.rows * self.columns))
            found: torch.Tensor = forward(self, rows)
            return found

        monkeypatch.setattr(layer, "forward", watched)

    def attend(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        work.append((query.shape[2], 2 * query.numel() * key.shape[2]))
        return attention(query, key, value, **options)

    def run(pixels: torch.Tensor) -> tuple[int, torch.Tensor]:
        pieces, total = vision.pieces(pixels), 0
        while True:
            work.clear()
            try:
                next(pieces)
            except StopIteration as done:
                return total, done.value
            rows = max((rows for rows, _ in work), default=0)
            count = sum(count for _, count in work)
            assert rows <= 16 or count <= tower.PIECE
            total += count

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for layer in (RowParallelLinear, ColumnParallelLinear):
        watch(layer)
    with torch.inference_mode():
        expected = [run(pixels) for pixels in tensors]
        for piece in (1, 1 << 17):
            monkeypatch.setattr(tower, "PIECE", piece)
            for pixels, (work_of_it, features) in zip(tensors, expected, strict=True):
                total, found = run(pixels)
                assert total == work_of_it > 0
                torch.testing.assert_close(found, features, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sees", ["qwen3_vl"], indirect=True)
def test_images_of_more_tokens_than_the_context_are_refused(sees: Sees) -> None:
    """Those behind the first ones that are too many are not even prepared."""
    chat = [user(*[picture(1, 64, 64)] * 60, "What?")]
    chat[0]["content"][-2]["data"] = "no image"
    with pytest.raises(RequestError, match=r"The first \d+ images have \d+ tokens") as refused:
        sees.encode(chat)
    assert refused.value.code == "context_length_exceeded"


def test_features_matter_and_their_order_does(sees: Sees) -> None:
    one, two = picture(1), picture(7, 64, 30)
    prompts = [
        sees.encode([user("First ", first, " then ", second, "?")])
        for first, second in ((one, two), (two, one))
    ]
    engine = sees.engine()
    answers = engine.generate(prompts)
    assert answers[0] != answers[1]
    blind = sees.engine()
    work = blind.runner.images.rows
    blind.runner.images.rows = lambda parts: ImageRows(
        work(parts).rows, torch.zeros_like(work(parts).features)
    )
    assert blind.generate(prompts[:1])[0] != answers[0]


@pytest.mark.parametrize("sees", TWO, indirect=True)
def test_answers_do_not_depend_on_the_batch_the_cache_or_the_pieces(sees: Sees) -> None:
    """Nor on whether the features were computed again."""
    chats = [[user(LONG, picture(seed, 30 + seed, 50), "What?")] for seed in range(4)]
    prompts = [sees.encode(chat) for chat in chats]
    alone = [sees.engine().generate([prompt])[0] for prompt in prompts]
    engine = sees.engine()
    assert engine.generate(prompts) == alone
    assert engine.generate(prompts[::-1]) == alone[::-1]
    assert engine.runner.images.num_computed == 4
    for prompt in prompts:
        engine.scheduler.images.drop(DropImage(prompt.pictures[0].key))
    engine.scheduler.flush_cache()
    assert engine.generate(prompts) == alone
    assert engine.runner.images.num_computed == 8


@pytest.mark.parametrize("sees", ["qwen2_5_vl"], indirect=True)
def test_a_checkpoint_in_the_form_of_its_publication_is_the_same(
    sees: Sees, tmp_path: Path
) -> None:
    """Qwen2.5-VL was published with one level in its config, and with other names of tensors."""
    folder = tmp_path / "model"
    shutil.copytree(sees.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    published = {"rope_theta": theta, "rope_scaling": {"type": "mrope", **rope}}
    del published["rope_scaling"]["rope_type"]
    (folder / "config.json").write_text(json.dumps({**text, **config, **published}))
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(renamed, folder / "model.safetensors")
    engine, prompt = InProcessEngine(folder, page_size=8, context_length=1024), sees.encode(THREE)
    assert (logits_of(engine, prompt) == logits_of(sees.engine(), prompt)).all()


@pytest.mark.skipif(not THOROUGH, reason="make determinism runs it")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_depend_on_the_request_alone(sees: Sees, dtype: str) -> None:
    """Whatever the chunks, the pages, the batch, the cache and the threads are: tokens and
    log-probabilities."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    chats = [
        [user(LONG[seed:], picture(seed, 20 + 9 * seed, 50), LONG * (seed % 3), picture(seed + 1))]
        for seed in range(12)
    ]
    prompts = [sees.encode(chat) for chat in chats]

    def bits(engine: InProcessEngine, *, together: bool) -> list[object]:
        found: list[object] = []
        for some in [prompts] if together else [[prompt] for prompt in prompts]:
            answers = engine.generate(some, greedy)
            found += zip(answers, engine.logprobs, strict=True)
        return found

    expected = bits(sees.engine(dtype=dtype), together=False)
    for chunk in (16, 40, 512):
        for threads in (1, 2):
            engine = sees.engine(
                dtype=dtype, chunked_prefill_size=chunk, max_prefill_tokens=2 * chunk
            )
            use_threads(threads)
            try:
                assert bits(engine, together=True) == expected, (chunk, threads)
                assert bits(engine, together=False) == expected, "warm"
                engine.scheduler.flush_cache()
                assert bits(engine, together=True) == expected, "cold again"
            finally:
                use_threads(1)


@pytest.mark.parametrize("sees", TWO, indirect=True)
def test_drafts_and_retractions_change_no_token(sees: Sees) -> None:
    chats = [[user(LONG, picture(seed), LONG * (1 + seed), "What?")] for seed in range(4)]
    prompts = [sees.encode(chat) for chat in chats]
    expected = sees.engine().generate(prompts)
    drafting = sees.engine(speculation="auto")
    assert drafting.generate(prompts) == expected
    assert drafting.generate(prompts) == expected
    tight = sees.engine(max_total_tokens=sum(len(p.token_ids) for p in prompts[2:]) + 64)
    assert tight.generate(prompts) == expected
    assert tight.scheduler.stats(0).retractions or tight.scheduler.stats(0).evicted_pages


def adapted(sees: Sees, folder: Path, targets: str) -> Any:
    """A random adapter of peft, saved in ``folder``, and its model."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(sees.folder).eval()
    torch.manual_seed(5)
    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, r=4, lora_alpha=8, init_lora_weights=False)
    )
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize("sees", ["gemma3", "qwen3_vl"], indirect=True)
def test_adapters_of_the_language_model_answer_about_images_like_peft(
    sees: Sees, tmp_path: Path
) -> None:
    model = adapted(sees, tmp_path / "text", r".*language_model.*(q_proj|v_proj|down_proj)")
    chat, text = CHATS["four of different sizes, between text"], [user("What is a radix tree?")]
    engine = sees.engine(max_loras=2, max_lora_rank=8, chunked_prefill_size=32)
    prompts = [sees.encode(one) for one in (chat, text)]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = engine.generate(prompts, sampling)
    assert not isinstance(engine.load_adapter("one", tmp_path / "text"), RequestError)
    answers = engine.generate([*prompts, *prompts], sampling, adapters=["one", "one", "", ""])
    assert answers == [*(sees.reference_answer(one, 12, model) for one in (chat, text)), *plain]
    assert answers[:2] != plain
    adapted(sees, tmp_path / "tower", r".*(vision_tower|visual).*(q_proj|qkv)")
    refused = engine.load_adapter("two", tmp_path / "tower")
    assert isinstance(refused, RequestError) and "no linear layer" in str(refused)


@pytest.mark.parametrize("sees", TWO, indirect=True)
def test_no_image_is_drafted(sees: Sees) -> None:
    """The tree has an image behind the tokens of a prompt."""
    prompt = sees.encode(THREE)
    text = prompt.token_ids[: prompt.images[0].start]
    (expected,) = sees.engine().generate([text])
    engine = sees.engine(speculation="auto")
    engine.generate([prompt])
    sequence = Sequence(
        SequenceRequest(
            seq_id=999, token_ids=pack_ids(text), options=RequestOptions(sampling=GREEDY)
        ),
        0.0,
        (),
    )
    kv = engine.scheduler.state.kv
    sources = kv.draft_sources(sequence, kv.find_prefix(sequence))
    assert min(unpack_ids(sources.continuation), default=0) >= 0
    assert engine.generate([text]) == [expected]


def test_an_8_bit_cache_serves_text_alone_where_images_are_whole(sees: Sees) -> None:
    engine = sees.engine(kv_cache_dtype="int8")
    is_whole = sees.vision.whole_images
    assert (engine.info.vision is None) is is_whole
    assert ("--kv-cache-dtype int8" in engine.info.why_no_images) is is_whole
    assert engine.generate([[5, 6, 7]])[0]


def test_ids_of_many_images_are_negative_and_no_page_repeats() -> None:
    pages, bits = set(), 0
    for number in range(100_000):
        ids = image_key_ids(hashlib.sha256(number.to_bytes(4)).digest(), 0, SHORTEST_PAGE)
        assert ids.dtype == np.int32 and ids.max() < 0
        pages.add(ids.tobytes())
        bits |= int(np.bitwise_or.reduce(-1 - ids))
    assert len(pages) == 100_000
    assert bits == 2**31 - 1, "all bits tell images apart"


def test_experts_may_be_transposed(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3-VL have them so, and later ones have not."""
    folder = make_image_checkpoint("qwen3_vl_moe", tmp_path)
    model = load_model(folder, load_format="dummy")
    name = "model.language_model.layers.0.mlp.experts.{}"
    for projection, shape in (("gate_up_proj", (4, 80, 64)), ("down_proj", (4, 64, 40))):
        stack = torch.randn(shape)
        plain, transposed = (
            dict(model.translate(name.format(projection), tensor))
            for tensor in (stack, stack.transpose(1, 2))
        )
        assert len(plain) == (8 if projection == "gate_up_proj" else 4)
        assert all(torch.equal(plain[one], transposed[one]) for one in plain)


def test_drafts_of_a_further_layer_change_no_answer_about_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer reads placeholders; Qwen3.5 has it, recurrent layers and positions in three axes."""
    watch_drafts(monkeypatch, MtpHead)
    sees = Sees("qwen3_5", tmp_path)
    asked = [sees.encode(chat) for chat in CHATS.values()]
    expected = sees.engine().generate(asked, GREEDY)
    add_mtp(tmp_path)
    engine = sees.engine(speculation="head")
    assert engine.info.speculation == "mtp"
    for _ in range(2):
        assert engine.generate(asked, GREEDY) == expected
    assert engine.scheduler.state.counters.drafted_tokens["mtp"] > 100
