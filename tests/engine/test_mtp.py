"""A layer that predicts further tokens computes what transformers does, whatever the cache, the
chunks and the batch are; and changes no answer."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models import head_files, memory_need
from radixrt.models.checkpoint import read_config, resolve_model_path, text_config
from radixrt.models.eagle3 import Eagle3Head
from radixrt.models.memory_need import engine_bytes, engine_need
from radixrt.models.mtp import MtpHead
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.drafts.drafters import Draft
from radixrt.worker.drafts.head import KINDS, HeadDrafter
from radixrt.worker.drafts.price import DraftPrice
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.checkpoints.draft_heads import Drafted, Foresight, check_drafts, make_head, watch_drafts
from tests.checkpoints.mtp_checkpoints import (
    MORE_MTP_FAMILIES,
    MTP_FAMILIES,
    TransformersMtp,
    make_with_mtp,
)
from tests.engine.in_process import InProcessEngine
from tests.engine.test_draft_heads import GREEDY, prompts
from tests.engine.test_grammars import SCHEMA
from tests.engine.test_speculation import TORTURE, answers, twenty_requests
from tests.scheduler.engine_model import expect_nothing


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_with_mtp(family, tmp_path_factory.mktemp(family))
            make_tokenizer(made[family])
        return made[family]

    return make


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    return watch_drafts(monkeypatch, MtpHead)


@pytest.mark.parametrize("family", [*MTP_FAMILIES, *(MORE_MTP_FAMILIES if TORTURE else ())])
def test_the_layer_computes_what_transformers_does(
    with_mtp: Callable[[str], Path], drafted: list[Drafted], family: str
) -> None:
    """Cold, behind a cached prefix, in chunks and in a batch."""
    folder = with_mtp(family)
    engine = InProcessEngine(
        folder, dtype="float32", speculation="head", page_size=4, chunked_prefill_size=24
    )
    assert engine.info.speculation == "mtp"
    chain = TransformersMtp(folder).chain
    documents = prompts(3, 40, 60)
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    engine.generate(documents, sampling)
    assert check_drafts(drafted, chain) > 10
    drafted.clear()
    engine.generate([[*document, 5, 6] for document in documents], sampling)
    assert min(engine.cached) >= 32
    assert check_drafts(drafted, chain) > 10


@pytest.mark.parametrize(("quantization", "alone"), [("auto", False), ("int8", True)])
def test_of_a_large_vocabulary_the_frequent_tokens_and_those_of_the_text_are_drafted(
    with_mtp: Callable[[str], Path],
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
    alone: bool,
) -> None:
    """The likeliest of them, as transformers computes them; 8 bits turn few choices around. What
    another salt's text has had is not drafted, nor, without the radix cache, another request's."""
    frequent = 24
    monkeypatch.setattr(head_files, "FREQUENT_IDS", frequent)
    folder = with_mtp("glm4_moe")
    engine = InProcessEngine(
        folder, dtype="float32", speculation="head", page_size=4, quantization=quantization,
        disable_radix_cache=alone,
    )  # fmt: skip
    found: list[tuple[list[int], set[int], Draft]] = []
    draft = HeadDrafter.draft

    def watched(drafter: HeadDrafter, wanted: dict[int, int], *rest: Any) -> None:
        texts = {slot: list(drafter._followed[slot].text) for slot in wanted}
        draft(drafter, wanted, *rest)
        for slot, one in drafter._drafts.items():
            own = drafter._own_tokens(slot)
            assert own is not None
            found.append((texts[slot], {*range(frequent), *own.token_ids}, one))

    monkeypatch.setattr(HeadDrafter, "draft", watched)
    for seed, salts in enumerate((["a", "b"], ["c", "d"])):
        engine.generate(prompts(2, 40, 60, seed), GREEDY, salt=salts)
    assert all(rows.shape[1] == frequent for one in drafted for rows in one.logits)
    reference = TransformersMtp(folder)
    likeliest, own, sure = 0, 0, 0
    for text, drafted_ids, given in found:
        assert drafted_ids <= {*range(frequent), *text}
        tokens, allowed = given.token_ids, torch.tensor(sorted(drafted_ids))
        chain = reference.chain(text, len(tokens), tokens)
        sure += int(KINDS * chain[0][allowed].softmax(0).max()) == given.kind
        for token, logits in zip(tokens, chain, strict=True):
            assert token in allowed
            likeliest += int(allowed[logits[allowed].argmax()]) == token
            own += token >= frequent
    assert sum(ids >= {*text} for text, ids, _ in found) > 0.8 * len(found), "soon they are read"
    count = sum(len(one.token_ids) for _, _, one in found)
    assert count > 100 and 0.1 < own / count < 0.9, (own, count)
    assert likeliest / count > (0.95 if quantization == "auto" else 0.8)
    assert sure / len(found) > 0.8


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_the_layer_of_a_gguf_file_drafts_as_that_of_the_checkpoint(
    with_mtp: Callable[[str], Path],
    drafted: list[Drafted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """In floats the same numbers, and nearly the same where most matrices stay in blocks."""
    gguf = pytest.importorskip("gguf")
    from tests.models.gguf_files import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = with_mtp(family)
    served = {"checkpoint": folder}
    blocks = ("eh_proj.", "gate_proj.", "up_proj.")
    for kind in ("F32", "Q8_0"):
        kinds = {part: gguf.GGMLQuantizationType[kind] for part in blocks}
        file = write_gguf(
            folder,
            tmp_path / f"{kind}.gguf",
            lambda name, kinds=kinds: next(  # type: ignore[misc]
                (kinds[part] for part in kinds if part in name), gguf.GGMLQuantizationType.F32
            ),
        )
        served[kind] = resolve_model_path(str(file))
    found = {}
    for kind, path in served.items():
        engine = InProcessEngine(path, dtype="float32", speculation="head", page_size=4)
        assert engine.info.speculation == "mtp"
        drafted.clear()
        engine.generate(prompts(2, 30, 40), GREEDY)
        found[kind] = list(drafted)
    assert len(found["F32"]) == len(found["checkpoint"]) > 10
    for expected, same in zip(found["checkpoint"], found["F32"], strict=True):
        assert same.texts == expected.texts
        for mine, theirs in zip(same.logits, expected.logits, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    first, rounded = found["checkpoint"][0], found["Q8_0"][0]
    assert rounded.texts == first.texts
    likeness = F.cosine_similarity(rounded.logits[0], first.logits[0])
    assert 0.99 < likeness.min() < 1


@pytest.mark.parametrize("kind", ["head", *MTP_FAMILIES])
def test_drafts_behind_a_hit_of_1000_tokens_are_those_of_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same numbers, so they are accepted as often."""
    long: dict[str, Any] = {"max_position_embeddings": 2048}
    settings: dict[str, Any] = {"speculation": "head", "page_size": 16}
    if kind == "head":
        folder = make_checkpoint("llama", tmp_path / "model", **long)
        config = json.loads((folder / "config.json").read_text())
        settings["draft_model"] = str(make_head(tmp_path / "head", config))
    else:
        folder = make_with_mtp(kind, tmp_path / "model", **long)
    drafted = watch_drafts(monkeypatch, Eagle3Head if kind == "head" else MtpHead)
    (document,) = prompts(1, 1008, 1008)
    found = []
    for openings in ([], [[*document, 7, 8, 9]]):
        engine = InProcessEngine(folder, **settings)
        for opening in openings:
            engine.generate([opening], GREEDY)
        drafted.clear()
        answer = engine.generate([[*document, 5, 6]], GREEDY)
        found.append((answer, [(one.texts, one.logits) for one in drafted]))
        assert engine.cached == ([1008] if openings else [0])
    (cold, cold_drafts), (warm, warm_drafts) = found
    assert warm == cold
    assert len(warm_drafts) == len(cold_drafts) > 10
    for (cold_texts, cold_logits), (texts, logits) in zip(cold_drafts, warm_drafts, strict=True):
        assert list(texts.values()) == list(cold_texts.values())
        for mine, theirs in zip(logits, cold_logits, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_drafts_of_the_layer_change_no_answer(
    with_mtp: Callable[[str], Path],
    facts: TokenizerFacts,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Every kind of sampling, with log-probabilities and grammars; with a cached prefix, retracted,
    and with weights in 8 bits."""
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.05)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
    if family == "qwen3_5":
        monkeypatch.setattr(head_files, "FREQUENT_IDS", 48)
    settings: dict[str, Any] = {"page_size": 4}
    settings |= {"quantization": "int8"} if family == "glm4_moe" else {}
    plain = InProcessEngine(with_mtp(family), **settings)
    if family == "deepseek_v3":
        monkeypatch.setattr(Admission, "_forecast", expect_nothing)
        settings["max_total_tokens"] = 160
    engine = InProcessEngine(with_mtp(family), **settings, speculation="head")
    foresight = Foresight(monkeypatch)
    for seed in range(25 if TORTURE else 1):
        asked = twenty_requests(random.Random(seed))
        expected, logprobs = answers(plain, asked, grammar)
        twice = [one.prompt for one in asked] * 2
        foresight.texts = [p + answer for p, answer in zip(twice, expected, strict=True)]
        assert answers(engine, asked, grammar) == (expected, logprobs)
    counters = engine.scheduler.state.counters
    accepted, drafted = (
        of["mtp"] for of in (counters.accepted_draft_tokens, counters.drafted_tokens)
    )
    assert 50 < accepted < drafted
    assert sum(counters.drafted_tokens.values()) == drafted
    assert (counters.retractions > 0) == (family == "deepseek_v3")


@pytest.mark.parametrize("frequent", [head_files.FREQUENT_IDS, 48])
def test_the_layer_is_loaded_unless_text_alone_is_to_be_drafted_from(
    with_mtp: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, frequent: int
) -> None:
    monkeypatch.setattr(head_files, "FREQUENT_IDS", frequent)
    folder = with_mtp("glm4_moe")
    hidden_size = text_config(read_config(folder))["hidden_size"]
    sources = {}
    for asked in ("auto", "head", "text", "off"):
        engine = InProcessEngine(folder, speculation=asked)
        sources[asked] = engine.info.speculation
        need = engine_need(ServerConfig(model_path=str(folder), speculation=asked))
        assert need.in_memory <= engine.info.weight_bytes <= 1.2 * need.in_memory
        assert (need.head > 0) == ("mtp" in engine.info.speculation)
        size = engine_bytes(ServerConfig(model_path=str(folder), speculation=asked), 1 << 30)
        with monkeypatch.context() as without:
            without.setattr(memory_need, "OWN_IDS", 0)
            size -= engine_bytes(ServerConfig(model_path=str(folder), speculation=asked), 1 << 30)
        drafts_own = need.head > 0 and frequent == 48
        assert size == drafts_own * head_files.OWN_IDS * (hidden_size + 3)
    assert sources == {"auto": "text, mtp", "head": "mtp", "text": "text", "off": ""}


def test_a_checkpoint_whose_layer_is_broken_is_served_without_it(
    with_mtp: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = with_mtp("qwen3_5") / "model.safetensors"
    (tmp_path / "config.json").write_bytes((file.parent / "config.json").read_bytes())
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert InProcessEngine(tmp_path, speculation="auto").info.speculation == "text"
    assert "1 missing (norm.weight)" in caplog.text
    with pytest.raises(ConfigError, match="1 missing"):
        InProcessEngine(tmp_path, speculation="head")
