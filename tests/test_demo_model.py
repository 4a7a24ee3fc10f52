"""The built-in model: a plain Hugging Face checkpoint, a tokenizer made for copying, test words
that it has not seen."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixrt.base.sampling_params import SamplingParams
from radixrt.worker.drafts.price import DraftPrice
from tests.engine.in_process import InProcessEngine

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "radixrt" / "demo_model"
sys.path.insert(0, str(ROOT / "examples" / "train_demo_model"))

import evaluate  # noqa: E402
import world  # noqa: E402
from model import Llama, LlamaShape  # noqa: E402

TASKS = ("qa", "second_turn", "json", "label", "tool", "talk")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def samples(count: int, split: world.Split = "train"):
    rng = random.Random(7)
    return [world.sample(rng, TASKS[i % len(TASKS)], i % 6, split) for i in range(count)]


def test_model_fits_the_repository_and_the_context_is_long():
    size = sum(f.stat().st_size for f in DEMO_MODEL.iterdir())
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert size <= 12e6
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 4096


def test_transformers_computes_what_was_trained(tokenizer):
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    shape = LlamaShape(**{k: config[k] for k in LlamaShape.__dataclass_fields__})
    weights = {
        k.removeprefix("model."): v.float()
        for k, v in load_file(DEMO_MODEL / "model.safetensors").items()
    }
    ours = Llama(shape, stream=torch.float32)
    ours.load_state_dict(weights)
    theirs = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokens = torch.tensor([tokenizer.encode(render_text(samples(1)[0]), add_special_tokens=False)])
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.logits(ours(tokens)), theirs(tokens).logits, rtol=1e-4, atol=1e-4
        )


def render_text(sample: world.Sample) -> str:
    return "".join(text for text, _ in world.render(sample.messages, sample.tools))


def test_chat_template_writes_what_training_read(tokenizer):
    for sample in samples(120):
        text = tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
        assert text == render_text(sample)


def test_cutting_a_chat_at_its_answers_does_not_change_its_tokens(tokenizer):
    for sample in samples(60):
        pieces = [
            tokenizer.encode(t, add_special_tokens=False)
            for t, _ in world.render(sample.messages, sample.tools)
        ]
        assert [i for piece in pieces for i in piece] == tokenizer.encode(
            render_text(sample), add_special_tokens=False
        )


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_comes_back_from_its_tokens(text):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", ["Zorvik", "kremalo", "Quathu", "4821", "KX-207", "Søren", "東京"])
def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer, name):
    alone = tokenizer.encode(name, add_special_tokens=False)
    for text in (
        f"It is {name}.",
        f'{{"name": "{name}"}}',
        f"{name}'s size",
        f"\n{name}\n",
        f"({name})",
    ):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert any(tokens[i : i + len(alone)] == alone for i in range(len(tokens)))


def test_training_and_evaluation_share_no_word():
    def words(split):
        rng, made = random.Random(11), set()
        for _ in range(500):
            source = world.Words(rng, split)
            source.name(), source.field_name(), source.number(), source.code(), source.noun()
            made |= source.used
        return made

    assert not words("train") & words("eval")


def test_the_expected_answer_is_right_and_another_is_not():
    for suite in evaluate.SUITES:
        rng = random.Random(3)
        sample = suite.make(rng, world.Words(rng, "eval"))
        expected = next(m for m in reversed(sample.messages) if m["role"] == "assistant")
        assert evaluate.is_right(suite.name, expected, expected)
        assert not evaluate.is_right(
            suite.name, expected, {"role": "assistant", "content": "No idea."}
        )


def test_a_difference_is_that_of_answers_to_the_same_conversations():
    before, after = (
        evaluate.Result("qa", "", 0.5, right=50 - len(wrong), asked=50, wrong=wrong)
        for wrong in ([3, 7, 20, 41], [49, 7, 3])
    )
    gain, error = after.gain(before)
    assert gain == pytest.approx(after.share - before.share)
    differences = [1, 1, -1] + [0] * 47  # of conversations 20, 41, 49 and the others
    assert gain == pytest.approx(1 / 50)
    assert error == pytest.approx(np.std(differences, ddof=1) / 50**0.5)


def test_model_answers_about_what_it_never_saw():
    """By transformers; tests/server/test_demo.py asks a server about every task."""
    suite = next(s for s in evaluate.SUITES if s.name == "tool")
    complete = evaluate.with_transformers(str(DEMO_MODEL))
    asked = 20
    (result,) = asyncio.run(evaluate.evaluate(complete, [suite], asked, False, 1, False))
    # Of 20 questions, a model at its bar gets this few right less than once in a hundred times.
    assert result.right >= asked * (suite.bar - 0.25)


def test_its_head_drafts_what_it_answers(tokenizer, monkeypatch):
    """Prompts that no head was trained on; the drafts are those of the head alone."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.05)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.05)
    rows = (ROOT / "examples/train_demo_model/held_out.jsonl").read_text().splitlines()[::5]
    prompts = []
    for row in map(json.loads, rows):
        text = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    expected = InProcessEngine(DEMO_MODEL).generate(prompts, sampling)
    engine = InProcessEngine(DEMO_MODEL, speculation="head")
    assert engine.info.speculation == "head"
    assert engine.generate(prompts, sampling) == expected
    counters, tokens = engine.scheduler.state.counters, sum(map(len, expected))
    assert tokens / (tokens - counters.accepted_draft_tokens["head"]) > 1.8  # tokens a step
