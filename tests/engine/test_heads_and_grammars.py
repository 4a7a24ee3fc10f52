"""A head changes no answer that is held to a grammar, whatever ids it drafts, nor one that another
engine has begun."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.token_bytes import SavedTokens, TokenBytes
from radixrt.constrained.backends import llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts, read_tokenizer
from radixrt.models.checkpoint import read_config
from radixrt.worker.drafts.price import DraftPrice
from tests.checkpoints import END_OF_TURN, make_served
from tests.checkpoints.draft_heads import DRAFT_VOCAB, Foresight, make_head
from tests.engine.in_process import InProcessEngine
from tests.engine.test_draft_heads import prompts
from tests.engine.test_grammars import SCHEMA
from tests.engine.test_speculation import TORTURE, twenty_requests


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.0)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.0)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)


@pytest.mark.parametrize("saved", [False, True], ids=["read", "saved"])
def test_ids_that_the_tokenizer_lacks_may_be_drafted(tmp_path: Path, saved: bool) -> None:
    """The model has them, as many models have more rows than their tokenizers have tokens. Beside
    a schema, before it begins, and behind a bound of the reasoning."""
    vocab_size, lacking = 512, 512 - DRAFT_VOCAB
    folder = make_served(tmp_path / "model", vocab_size=vocab_size)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = read_tokenizer(tokenizer_file)
    size = tokenizer.get_vocab_size()
    assert size <= lacking
    if saved:
        source = TokenBytes(tokenizer)
        texts = [source.bytes_of(token) for token in range(size)]
        ends = torch.tensor([len(text) for text in texts]).cumsum(0).numpy().astype("u4")
        special = tuple(sorted(source.special_ids))
        SavedTokens(special, ends.tobytes(), b"".join(texts)).save(tokenizer_file)
    facts = TokenizerFacts.load(tokenizer_file, vocab_size=vocab_size, eos_token_ids=(END_OF_TURN,))
    head = make_head(tmp_path / "head", read_config(folder))
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"].fill_(lacking)
    tensors["t2d"] = torch.arange(vocab_size) >= lacking
    save_file(tensors, head / "model.safetensors")
    schema = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    regex = llguidance.compile_regex("[a-c]{3}", facts)
    close = (1, 1)
    biased = dict.fromkeys(range(lacking, vocab_size), 3.0)  # answers may have such ids too
    kinds: list[tuple[Grammar, dict[str, Any], dict[str, Any]]] = [
        (schema, {}, {"logprobs": 1}),
        (schema, {"begin_after": [*close]}, {"logit_bias": biased}),
        (schema, {"begin_after": [*close], "opening": [lacking + 3]}, {"logit_bias": biased}),
        (
            regex,
            {"begin_after": [*close]},
            {"max_reasoning_tokens": 7, "reasoning_closing_ids": close, "logit_bias": biased},
        ),
    ]
    asked = prompts(len(kinds), 5, 20)
    found = []
    for draft_model in (None, str(head)):
        speculation = "off" if draft_model is None else "head"
        engine = InProcessEngine(folder, speculation=speculation, draft_model=draft_model)
        answers = engine.generate(
            asked,
            [
                SamplingParams(temperature=1.0, seed=seed, max_tokens=24, **sampling)
                for seed, (_, _, sampling) in enumerate(kinds)
            ],
            grammars=[engine.use(grammar, **use) for grammar, use, _ in kinds],
        )
        found.append((answers, engine.logprobs))
    assert found[1] == found[0]
    counters = engine.scheduler.state.counters
    assert counters.drafted_tokens["head"] > 0
    assert max(map(max, found[0][0])) >= lacking


def test_answers_that_were_begun_go_on_with_a_head(
    model_dir: Path, facts: TokenizerFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of an engine: at any token, of every kind of sampling, and in the middle
    of a grammar."""
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    head = make_head(tmp_path / "head", read_config(model_dir))
    plain = InProcessEngine(model_dir)
    engine = InProcessEngine(model_dir, speculation="head", draft_model=str(head), page_size=4)
    foresight = Foresight(monkeypatch)
    for seed in range(25 if TORTURE else 1):
        rng = random.Random(seed)
        asked = twenty_requests(rng)
        use = plain.use(grammar)
        whole = plain.generate(
            [one.prompt for one in asked],
            [one.sampling for one in asked],
            grammars=[use if one.json else None for one in asked],
        )
        every = list(zip(asked, whole, list(plain.logprobs), strict=True))
        foresight.texts = [one.prompt + answer for one, answer, _ in every]
        for one, answer, logprobs in every:
            if len(answer) < 2:
                continue
            kept = rng.randrange(1, len(answer))
            use_again = engine.use(grammar) if one.json else None
            rest = engine.generate_from(one.prompt, answer[:kept], one.sampling, use_again)
            assert answer[:kept] + rest == answer, (one, kept)
            assert engine.logprobs[0] == logprobs[kept:]
    assert engine.scheduler.state.counters.accepted_draft_tokens["head"] > 100
