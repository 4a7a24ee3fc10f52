"""A draft head computes what its authors describe, whatever the cache, the chunks and the batch
are; and changes no answer."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from radixrt.attention.states import StateSpec
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.messages.ids import pack_ids
from radixrt.messages.images import VisionInfo
from radixrt.messages.requests import PoolingInfo
from radixrt.messages.steps import DRAFTERS, Admit, DraftSources
from radixrt.models.decoder import CausalLM
from radixrt.models.eagle3 import Eagle3Head
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.drafts.drafters import Draft
from radixrt.worker.drafts.head import HeadDrafter
from radixrt.worker.drafts.head_choice import load_draft_head
from radixrt.worker.drafts.price import DraftPrice
from radixrt.worker.drafts.speculator import ANY_KIND, Speculator
from tests.checkpoints import make_checkpoint
from tests.checkpoints.draft_heads import (
    DRAFT_VOCAB,
    Drafted,
    Foresight,
    PlainHead,
    check_drafts,
    make_head,
    watch_drafts,
)
from tests.engine.in_process import InProcessEngine
from tests.engine.test_grammars import SCHEMA
from tests.engine.test_speculation import TORTURE, answers, twenty_requests
from tests.scheduler.engine_model import expect_nothing
from tests.servers.fake_scheduler import engine_info

TOWER = VisionInfo(
    family="", weights=b"", tokens_per_tile=1, tile_size=1, image_token=5, feature_bytes=4
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def config(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "config.json").read_text())


@pytest.fixture(scope="module", params=["sglang", "speculators"])
def head(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> Path:
    return make_head(tmp_path_factory.mktemp("head"), config, request.param)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    return watch_drafts(monkeypatch, Eagle3Head)


class Expected:
    """Drafts by plain heads."""

    def __init__(self, model_dir: Path, head: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._head = PlainHead(head, self._model.get_input_embeddings().weight)

    @torch.inference_mode()
    def chain(self, text: list[int], length: int) -> list[torch.Tensor]:
        tokens = torch.tensor([text[:-1]])
        states = self._model(tokens, output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in self._head.layers], -1)
        return self._head.chain(text, read, length)

    def check(self, drafted: list[Drafted]) -> int:
        """Compare drafts; returns their number."""
        return check_drafts(drafted, self.chain)


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 380) for _ in range(rng.randint(low, high))] for _ in range(count)]


def test_a_head_computes_what_plain_pytorch_does(
    model_dir: Path, head: Path, drafted: list[Drafted]
) -> None:
    """Cold, behind a cached prefix, in chunks and in a batch, and from one page size to another."""
    expected = Expected(model_dir, head)
    for page_size in (1, 16):
        engine = InProcessEngine(
            model_dir, dtype="float32", speculation="head", draft_model=str(head),
            page_size=page_size, chunked_prefill_size=24,
        )  # fmt: skip
        documents = prompts(3, 40, 60)
        engine.generate(documents, GREEDY)
        assert expected.check(drafted[::3]) > 20
        drafted.clear()
        engine.generate([[*document, 5, 6] for document in documents], GREEDY)
        assert min(engine.cached) >= 32
        assert expected.check(drafted[::3]) > 20
        drafted.clear()


def test_a_head_that_has_not_drafted_for_long_catches_up(
    model_dir: Path, head: Path, drafted: list[Drafted]
) -> None:
    """Another request goes on from the answer of one that was not drafted."""
    engine = InProcessEngine(
        model_dir, dtype="float32", speculation="head", draft_model=str(head), page_size=4
    )
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    (prompt,) = prompts(1, 20, 30)
    (answer,) = engine.generate([prompt], long, speculation=False)
    assert not drafted
    engine.generate([prompt + answer + [7]], GREEDY)
    assert engine.cached[0] > 150
    assert Expected(model_dir, head).check(drafted) > 10


def test_a_head_stays_right_where_sequences_are_dropped_and_retracted(
    model_dir: Path, head: Path, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of their drafts; others go on, and new ones begin on what they have left."""
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    engine = InProcessEngine(
        model_dir, dtype="float32", speculation="head", draft_model=str(head), page_size=4,
        max_total_tokens=256, chunked_prefill_size=16,
    )  # fmt: skip
    documents = prompts(6, 30, 40)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    seq_ids = engine.begin(documents, long)
    for step in range(200):
        engine.advance()
        if step in (9, 17, 23):
            engine.scheduler.release(np.array([seq_ids.pop()]))
    assert not engine.scheduler.num_running
    counters = engine.scheduler.state.counters
    assert counters.aborted == 3 and counters.retractions > 0
    engine.generate([[*document, 5, 6] for document in documents], GREEDY)
    assert sum(engine.cached) > 60
    assert Expected(model_dir, head).check(drafted[::5]) > 30


def test_a_head_reads_what_another_sequence_computes(
    model_dir: Path, head: Path, drafted: list[Drafted]
) -> None:
    """Prompts that arrive together share their prefix while it is computed."""
    engine = InProcessEngine(
        model_dir, dtype="float32", speculation="head", draft_model=str(head), page_size=4,
        chunked_prefill_size=16,
    )  # fmt: skip
    (document,) = prompts(1, 60, 60)
    engine.generate([[*document, 9, token] for token in (4, 5, 6)], GREEDY)
    assert sum(engine.cached) > 100
    assert Expected(model_dir, head).check(drafted) > 20


@pytest.fixture(params=["nan", "constant", "random", "sure"])
def poisoned(request: pytest.FixtureRequest, config: dict[str, Any], tmp_path: Path) -> str:
    """A head that drafts the first DRAFT_VOCAB ids; a sure one drafts the longest chains."""
    folder = make_head(tmp_path / "head", config, seed=3)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if request.param == "nan":
        tensors["fc.weight"].fill_(float("nan"))
    elif request.param == "constant":
        tensors["lm_head.weight"].zero_()
    elif request.param == "sure":
        tensors["lm_head.weight"] *= 1000
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < DRAFT_VOCAB
    save_file(tensors, file)
    return str(folder)


def test_a_poisoned_head_changes_no_answer(
    model_dir: Path, poisoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.0)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
    plain, engine = (
        InProcessEngine(model_dir, **settings)  # type: ignore[arg-type]
        for settings in ({}, {"speculation": "auto", "draft_model": poisoned})
    )
    asked = prompts(6, 5, 30)
    sampling = [
        SamplingParams(
            temperature=float(index % 2), seed=index, max_tokens=30, ignore_eos=True, logprobs=2,
            frequency_penalty=0.4 * (index % 3),
        )
        for index in range(6)
    ]  # fmt: skip
    for _ in range(2):
        assert engine.generate(asked, sampling) == plain.generate(asked, sampling)
        assert engine.logprobs == plain.logprobs
    assert engine.scheduler.state.counters.drafted_tokens["head"] > 0


def test_a_poisoned_head_is_soon_left_alone(
    model_dir: Path, poisoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may cost 5 % of an answer of which no token is drafted; a draft token costs a twentieth of
    a step, and as much again where it is verified."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.05)
    engine = InProcessEngine(model_dir, speculation="head", draft_model=poisoned)
    computed: list[int] = []
    draft = HeadDrafter.draft

    def counted(head: HeadDrafter, *arguments: Any) -> None:
        before = head.computed
        draft(head, *arguments)
        computed.append(head.computed - before)

    monkeypatch.setattr(HeadDrafter, "draft", counted)
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=400, ignore_eos=True,
        allowed_token_ids=tuple(range(DRAFT_VOCAB, 384)),
    )  # fmt: skip
    engine.generate(prompts(1, 20, 20), sampling)
    counters = engine.scheduler.state.counters
    verified = counters.drafted_tokens["head"]
    assert counters.accepted_draft_tokens["head"] == 0
    assert 5 < verified <= sum(computed)
    assert 0.05 * (sum(computed) + verified) < 0.05 * 400
    assert sum(computed[50:]) == sum(map(bool, computed[50:])) <= 4, "only trials"


def test_a_head_for_another_model_is_refused(
    model_dir: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    cases = {
        "is for another model": {"vocab_size": 999},
        "is for another model: it reads states": {"target_hidden_size": 32},
        "of several layers": {"num_hidden_layers": 2},
        "EAGLE-3 heads are served": {"architectures": ["MedusaModel"]},
        "reads the inputs of the layers": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "no map d2t|does not lead": {"draft_vocab_size": 50},
        "do not fit its config": {"intermediate_size": 95},
    }
    for number, (message, changes) in enumerate(cases.items()):
        folder = make_head(tmp_path / str(number), config, **changes)
        with pytest.raises(ConfigError, match=message):
            InProcessEngine(model_dir, speculation="head", draft_model=str(folder))


JUNK = (None, -1, 0, "x", [1], {"a": 1}, 1.5, 1 << 40)


def test_a_damaged_head_is_refused(
    model_dir: Path, config: dict[str, Any], head: Path, tmp_path: Path
) -> None:
    """Or loaded, if what is wrong matters to nothing; no other error than that of a setting."""
    engine = InProcessEngine(model_dir)
    file = Path(shutil.copytree(head, tmp_path / "head")) / "model.safetensors"
    asked = ServerConfig(model_path=str(model_dir), draft_model=str(file.parent))
    kernels, refused = layer_kernels(torch.device("cpu")), []

    def attempt(what: object) -> None:
        try:
            load_draft_head(asked, engine.runner._model, engine.info, kernels)
        except ConfigError:
            refused.append(str(what))

    right = (head / "config.json").read_text()
    for name in json.loads(right).keys() | {"rope_scaling", "rms_norm_eps", "hidden_act"}:
        for junk in JUNK:
            changed = json.loads(right)
            layer = changed.get("transformer_layer_config", changed)
            (layer if name in layer else changed)[name] = junk
            (file.parent / "config.json").write_text(json.dumps(changed))
            attempt((name, junk))
    for content in ("", "[]", "null", "{", "{}"):
        (file.parent / "config.json").write_text(content)
        attempt(content)
    (file.parent / "config.json").write_text(right)
    in_config, whole = len(refused), file.read_bytes()
    tensors = load_file(head / "model.safetensors")
    for name, tensor in tensors.items():
        for change in (tensor[:-1].clone(), torch.tensor(1), tensor.flatten()):
            if change.shape != tensor.shape and name != "t2d":
                save_file({**tensors, name: change}, file)
                attempt((name, change.shape))
                assert refused[-1] == str((name, change.shape))
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        attempt(length)
        assert refused[-1] == str(length)
    assert in_config > 40
    assert all(str((name, "x")) in refused for name in ("rms_norm_eps", "hidden_act"))


def test_a_head_is_refused_where_it_cannot_draft(
    model_dir: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(make_head(tmp_path / "head", config))
    make_checkpoint("qwen3_5", tmp_path / "hybrid")
    with pytest.raises(ConfigError, match="recurrent layers"):
        InProcessEngine(tmp_path / "hybrid", speculation="auto", draft_model=folder)
    with pytest.raises(ConfigError, match="needs a head"):
        InProcessEngine(model_dir, speculation="head")


@pytest.mark.parametrize(
    "reason, settings, facts",
    [
        ("a draft head on a GPU", {}, {"device": "cuda:0"}),
        ("a draft head with --tp", {"tp": 2}, {}),
        ("generates nothing", {}, {"pooling": PoolingInfo(task="embed", size=4)}),
        ("that sees images", {}, {"vision": TOWER}),
    ],
)
def test_what_no_head_drafts_for_is_said(
    model_dir: Path, config: dict[str, Any], tmp_path: Path,
    reason: str, settings: dict[str, Any], facts: dict[str, Any],
) -> None:  # fmt: skip
    """Asked for, it is an error that says what to leave out; else the model is served without."""
    head = str(make_head(tmp_path, config))
    asked = ServerConfig(model_path=str(model_dir), draft_model=head, **settings)
    info, model = engine_info(**facts), Llama.__new__(Llama)
    with pytest.raises(ConfigError, match=f"--draft-model: .*{reason}.*; leave it out"):
        load_draft_head(asked, model, info, layer_kernels(torch.device("cpu")))


class Llama(CausalLM):
    """Without weights."""

    def state_specs(self) -> list[StateSpec]:
        return []


# ------------------------------------------------------------ answers with a head


@pytest.mark.parametrize("case", ["roomy", "crowded", "int8"])
def test_drafts_of_a_head_change_no_answer(
    model_dir: Path,
    config: dict[str, Any],
    tmp_path: Path,
    facts: TokenizerFacts,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """Every kind of sampling, with log-probabilities and grammars; with a cached prefix, and
    retracted."""
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.05)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
    pages: dict[str, Any] = {"page_size": 4}
    if case == "int8":
        pages |= {"kv_cache_dtype": "int8", "quantization": "int8"}
    plain = InProcessEngine(model_dir, **pages)
    if case == "crowded":
        monkeypatch.setattr(Admission, "_forecast", expect_nothing)
        pages["max_total_tokens"] = 160
    folder = make_head(tmp_path / "head", config)
    engine = InProcessEngine(model_dir, **pages, speculation="head", draft_model=str(folder))
    foresight = Foresight(monkeypatch)
    for seed in range(25 if TORTURE else 1):
        asked = twenty_requests(random.Random(seed))
        expected, logprobs = answers(plain, asked, grammar)
        prompts = [one.prompt for one in asked] * 2
        foresight.texts = [p + answer for p, answer in zip(prompts, expected, strict=True)]
        assert answers(engine, asked, grammar) == (expected, logprobs)
    counters = engine.scheduler.state.counters
    accepted, drafted = (
        of["head"] for of in (counters.accepted_draft_tokens, counters.drafted_tokens)
    )
    assert 50 < accepted < drafted
    assert sum(counters.drafted_tokens.values()) == drafted
    assert (counters.retractions > 0) == (case == "crowded")


def test_text_and_head_compete(
    model_dir: Path, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the text is known the head is not asked, and where it is not, text drafts are not."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.1)
    folder = make_head(tmp_path / "head", config)
    engine = InProcessEngine(model_dir, speculation="auto", draft_model=str(folder))
    foresight = Foresight(monkeypatch)
    sampling = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=60, ignore_eos=True)
        for seed in range(8)
    ]
    asked = prompts(8, 20, 30, seed=5)
    expected = InProcessEngine(model_dir).generate(asked, sampling)
    foresight.texts = [p + answer for p, answer in zip(asked, expected, strict=True)]
    accepted = engine.scheduler.state.counters.accepted_draft_tokens
    assert engine.generate(asked, sampling) == expected
    assert accepted["head"] > 4 * (accepted["ngram"] + accepted["pool"] + accepted["tree"])
    by_head = accepted["head"]
    assert engine.generate(asked, sampling) == expected
    assert accepted["tree"] > accepted["head"] - by_head


class Sure(HeadDrafter):
    """A head that still has the draft of its last step."""

    def __init__(self) -> None:
        self.name = "head"

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft:
        return Draft([5, 6, 7, 8], 3)


def test_the_last_draft_of_a_head_is_no_reason_against_the_next() -> None:
    speculator = Speculator((), lambda slot: [], lambda slot, tokens: tokens, Sure())
    admit = Admit(0, pack_ids([3, 4]), 0, b"", GREEDY, 0, drafts=DraftSources())
    speculator.admit(admit)
    assert speculator.length_for_head(0, room=8, price=0.05, cost=0.05) == 3


class Short(HeadDrafter):
    """A head that is right about two tokens of a text that repeats itself."""

    def __init__(self, period: list[int]) -> None:
        self.name = "head"
        self.period, self.place = period, 0

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        if ahead:
            return None
        next_two = [self.period[(self.place + i) % len(self.period)] for i in range(2)]
        return Draft([*next_two, 9999][:budget], 3)


def test_others_are_judged_where_the_head_drafts_in_their_place() -> None:
    """They were wrong before, and the text has come to repeat itself."""
    period = list(range(100, 140))
    head = Short(period)
    speculator = Speculator((), lambda slot: [], lambda slot, tokens: tokens, head)
    sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
    admit = Admit(0, pack_ids(period * 2), 0, b"", sampling, 0, drafts=DraftSources())
    speculator.admit(admit)
    ngram, by_head = (DRAFTERS.index(name) for name in ("ngram", "head"))
    for _ in range(20):
        speculator._chances.learn((by_head, ANY_KIND), 3, 2)
        speculator._chances.learn((by_head, 3), 3, 2)
        for kind in range(12):
            speculator._chances.learn((ngram, kind), 1, 0)
    asked = []
    for _ in range(80):
        asked.append(speculator.length_for_head(0, room=16, price=0.05, cost=0.05))
        draft = speculator.propose(0, 16, 0.05)
        coming = [period[(head.place + i) % len(period)] for i in range(len(draft) + 1)]
        accepted = next((i for i, token in enumerate(draft) if token != coming[i]), len(draft))
        new = coming[: accepted + 1]
        speculator.extend(np.zeros(len(new), np.int64), np.array(new, np.int32))
        head.place += len(new)
    assert asked[0] > 0, "at first the head is known to be better"
    assert not any(asked[-10:]), "then the text is"
