"""A worker whose steps overlap gives the tokens of one whose steps do not, and never waits."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.attention import flashinfer, registry
from radixrt.attention.flashinfer import FlashInferBackend
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CpuDevice
from radixrt.messages.requests import DEFAULT_POOLING, PoolingRequest
from radixrt.models.decoder import CausalLM
from radixrt.scheduler.queue.admission import Admission
from radixrt_kernels import available
from tests.attention.fake_flashinfer import FakeFlashInfer
from tests.checkpoints import END_OF_TURN, VOCAB_SIZE, make_pooled
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.engine.test_grammars import SCHEMA, answers
from tests.engine.test_memory_pressure import MODEL, PAGE_SIZE, alone, answers_in_a_crowd, requests
from tests.fake_device import FakeDevice
from tests.scheduler.engine_model import expect_nothing


@pytest.fixture(autouse=True)
def flashinfer_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry._BACKENDS,
        "flashinfer",
        lambda setup: FlashInferBackend(setup, FakeFlashInfer()),
    )


def on_gpu(model_dir: Path, **settings: object) -> tuple[InProcessEngine, FakeDevice]:
    """An engine as on a GPU: FlashInfer, graphs, steps that overlap."""
    device = FakeDevice()
    engine = InProcessEngine(
        model_dir, device=device, **{"attention_backend": "flashinfer", **settings}
    )
    device.waits.clear()
    FakeDevice.reads.clear()
    return engine, device


SEVERAL = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, min_p=0.05, frequency_penalty=0.5, max_tokens=14),
    SamplingParams(temperature=0.7, seed=5, top_k=20, repetition_penalty=1.2, max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=8, min_tokens=6, logit_bias={7: 3.0}, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
]


@pytest.mark.parametrize("embeds", [True, False])
def test_overlapping_steps_give_the_same_numbers(
    model_dir: Path, tmp_path: Path, embeds: bool
) -> None:
    folder = make_pooled("qwen3", tmp_path, pooling="lasttoken") if embeds else model_dir
    pool = DEFAULT_POOLING if embeds else PoolingRequest((7, 300))
    plain = InProcessEngine(folder).pool(make_prompts(), pool)
    engine, _ = on_gpu(folder)
    for _ in range(2):
        found = engine.pool(make_prompts(), pool)
        np.testing.assert_allclose(np.stack(found), np.stack(plain), atol=1e-5)
    assert FakeDevice.reads == [] and max(engine.cached) > 0


def test_overlapping_steps_give_the_same_tokens_and_logprobs(model_dir: Path) -> None:
    prompts = [make_prompts()[i % len(make_prompts())] for i in range(len(SEVERAL))]
    plain = InProcessEngine(model_dir)
    for engine in (
        InProcessEngine(model_dir, device=CpuDevice(overlaps=True)),
        on_gpu(model_dir)[0],
    ):
        assert engine.generate(prompts, SEVERAL) == plain.generate(prompts, SEVERAL)
        for mine, theirs in ((engine.logprobs, plain.logprobs), (engine.prompt_logprobs, plain.prompt_logprobs)):  # fmt: skip
            for rows, expected in zip(mine, theirs, strict=True):
                assert [row.token_ids for row in rows] == [row.token_ids for row in expected]
                for row, other in zip(rows, expected, strict=True):
                    assert row.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_moe", "mistral"])
def test_every_kind_of_layer(checkpoint: Callable[[str], Path], architecture: str) -> None:
    folder = checkpoint(architecture)
    engine, device = on_gpu(folder)
    assert engine.generate(make_prompts()) == InProcessEngine(folder).generate(make_prompts())
    assert device.replays > 30


def test_sequences_that_share_a_prefix_decode_in_a_cascade(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "cascade_pays", lambda *arguments: True)
    library = FakeFlashInfer()
    monkeypatch.setitem(
        registry._BACKENDS, "flashinfer", lambda setup: FlashInferBackend(setup, library)
    )
    rng = random.Random(1)
    document = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts = [[*document, *[rng.randrange(3, VOCAB_SIZE) for _ in range(i + 1)]] for i in range(5)]
    prompts.append([rng.randrange(3, VOCAB_SIZE) for _ in range(6)])
    expected = InProcessEngine(model_dir, page_size=4).generate(prompts)
    for settings in ({}, {"debug_disable_cuda_graph": True}):
        engine, _ = on_gpu(model_dir, page_size=4, **settings)
        library.calls.clear()
        assert engine.generate(prompts) == expected
        assert sum(call.name == "merge_state_in_place" for call in library.calls) > 100


# ---------------------------------------------------------------- grammars


@pytest.fixture(scope="module")
def schema_grammar(model_dir: Path) -> Grammar:
    facts = TokenizerFacts.load(
        model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=(END_OF_TURN,)
    )
    return llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")


@pytest.mark.parametrize(
    ("page_size", "penalties"),
    [(1, {}), (16, {"frequency_penalty": 1.0, "repetition_penalty": 1.3})],
)
def test_constrained_answers_are_the_same_and_jump_a_step_late(
    model_dir: Path, schema_grammar: Grammar, page_size: int, penalties: dict[str, float]
) -> None:
    plain = InProcessEngine(model_dir, page_size=page_size, debug_disable_jump_forward=True)
    expected = answers(plain, schema_grammar, **penalties)
    jumping, _ = on_gpu(model_dir, page_size=page_size)
    stepping, _ = on_gpu(model_dir, page_size=page_size, debug_disable_jump_forward=True)
    assert answers(jumping, schema_grammar, **penalties) == expected
    assert answers(stepping, schema_grammar, **penalties) == expected
    assert jumping.scheduler.state.counters.forced_tokens > 20
    assert jumping.scheduler.state.counters.steps < 0.9 * stepping.scheduler.state.counters.steps


def test_a_retracted_answer_goes_on_where_its_grammar_was(
    model_dir: Path, schema_grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    quiet = answers(InProcessEngine(model_dir, page_size=4), schema_grammar, max_tokens=60)
    crowded, _ = on_gpu(model_dir, page_size=4, max_total_tokens=132)
    assert answers(crowded, schema_grammar, max_tokens=60) == quiet
    assert crowded.scheduler.state.counters.retractions > 0


# ---------------------------------------------------------------- crowds


def test_answers_in_a_crowd_are_those_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots change hands while steps of their former owners are in flight."""
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    rng = random.Random(9)
    wanted = requests(random.Random(5))
    undisturbed = alone(wanted)
    need = max(len(r.token_ids) // 4 + (r.sampling.max_tokens or 0) for r in wanted)
    engine = InProcessEngine(
        MODEL,
        device=CpuDevice(overlaps=True),
        dtype="float32",
        page_size=PAGE_SIZE,
        max_total_tokens=round(1.2 * need),
    )
    leave = set(rng.sample(range(len(wanted)), 8))
    given, finished = answers_in_a_crowd(engine, wanted, leave, rng)
    assert finished >= given.keys() - leave and not leave <= finished
    for seq_id, answer in given.items():
        expected = undisturbed[seq_id]
        assert answer == (expected if seq_id in finished else expected[: len(answer)])
    assert engine.scheduler.state.counters.retractions > 10
    engine.scheduler.flush_cache()
    assert engine.scheduler.state.kv.allocator.num_free == engine.scheduler.state.limits.num_pages


# ---------------------------------------------------------------- waiting


@pytest.mark.skipif(
    not available(),
    reason="PyTorch's own sampler, which no GPU uses, reads its settings on the host",
)
@pytest.mark.parametrize("constrained", [False, True])
def test_the_host_waits_only_for_tokens_while_the_next_step_is_computed(
    model_dir: Path,
    schema_grammar: Grammar,
    constrained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, device = on_gpu(model_dir)
    forward = CausalLM.forward

    def slow_forward(model: CausalLM, *arguments: Any) -> Any:
        device.compute()
        return forward(model, *arguments)

    monkeypatch.setattr(CausalLM, "forward", slow_forward)
    if constrained:
        answers(engine, schema_grammar)
    else:
        prompts = [make_prompts()[i % len(make_prompts())] for i in range(len(SEVERAL))]
        engine.generate(prompts, SEVERAL)
    assert FakeDevice.reads == []
    assert device.replays > 5
    assert {what for what, _ in device.waits} == {"download"}
    assert len(device.waits) == engine.scheduler.state.counters.steps
    idle = [step for step, (_, behind) in enumerate(device.waits) if behind == 0]
    assert len(idle) <= 2, "the device ran out of orders before the end"
