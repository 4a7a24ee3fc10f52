"""``allowed_token_ids`` and ``bad_words`` through the real scheduler and worker, against brute
force."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CPU, CpuDevice, Device
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.sampling.grammar_loader import GrammarLoader
from radixrt.worker.sampling.matchers import SlotMatchers
from radixrt.worker.sampling.sampler import sample
from radixrt.worker.sampling.state import SamplingState
from tests.checkpoints import END_OF_TURN, VOCAB_SIZE
from tests.engine.in_process import InProcessEngine
from tests.engine.test_against_transformers import make_prompts
from tests.engine.test_grammars import text_of
from tests.scheduler.engine_model import expect_nothing

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["alpha", "omega"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
DEVICES = [CPU, CpuDevice(overlaps=True)]
Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def logits(model_dir: Path) -> Logits:
    """transformers' logits at every position of a sequence: [tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0].detach()


def may_come(token: int, answer: Sequence[int], params: SamplingParams) -> bool:
    """By the definition: whether a token may come after an answer so far."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    longer = [*answer, token]
    return not any(tuple(longer[-len(bad) :]) == bad for bad in params.bad_words_token_ids)


def restricted(free: list[int], seed: int, *, max_tokens: int = 40) -> SamplingParams:
    """Forbid sequences of one to four tokens of a free answer, and every second one allow only half
    of the tokens."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(free) - 4) for _ in range(6)]
    sequences = [tuple(free[at : at + 1 + index % 4]) for index, at in enumerate(starts)]
    half = {*rng.sample(range(VOCAB_SIZE), VOCAB_SIZE // 2), *free[:6]}
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        bad_words_token_ids=tuple(sequences),
        allowed_token_ids=tuple(half) if seed % 2 else None,
    )


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_greedy_answers_are_the_likeliest_tokens_that_may_come(
    model_dir: Path, logits: Logits, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)  # so that pages run out
    engine = InProcessEngine(model_dir, device=device, page_size=4, max_total_tokens=200)
    prompts = make_prompts()
    free = engine.generate(prompts)
    each = [restricted(answer, seed) for seed, answer in enumerate(free)]
    answers = engine.generate(prompts, each)
    assert engine.scheduler.state.counters.retractions > 0
    assert answers != [answer[:40] for answer in free]
    for prompt, answer, params in zip(prompts, answers, each, strict=True):
        assert len(answer) == 40
        rows = logits(prompt + answer[:-1])[len(prompt) - 1 :]
        for position, row in enumerate(rows):
            likeliest = next(
                token
                for token in row.argsort(descending=True).tolist()
                if may_come(token, answer[:position], params)
            )
            assert answer[position] == likeliest, position


@pytest.mark.parametrize("device", DEVICES, ids=["plain", "overlap"])
def test_an_answer_keeps_its_grammar_and_its_lists(model_dir: Path, device: Device) -> None:
    facts = TokenizerFacts.load(
        model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=(END_OF_TURN,)
    )
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    without_o = tuple(
        i for i, text in enumerate(facts.tokens) if text and b"o" not in text and i != END_OF_TURN
    )
    comma = list(facts.tokens).index(b",")
    engine = InProcessEngine(model_dir, device=device)
    params = [
        SamplingParams(
            temperature=1.5,
            seed=seed,
            max_tokens=200,
            min_tokens=3,
            allowed_token_ids=without_o,
            bad_words_token_ids=((comma, comma), (list(facts.tokens).index(b"1"),)),
        )
        for seed in range(6)
    ]
    for answer in engine.generate(
        make_prompts()[:6], params, grammars=[engine.use(grammar)] * len(params)
    ):
        value = json.loads(text_of(facts, answer))
        jsonschema.validate(value, SCHEMA)
        assert value["kind"] == "alpha", "the other kind is written with an o"
        assert set(answer[:-1]) <= {*without_o} and list(facts.tokens).index(b"1") not in answer


def test_an_allowed_end_token_waits_for_min_tokens(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir)
    stops = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=4, allowed_token_ids=(7, END_OF_TURN)
    )
    (answer,) = engine.generate([make_prompts()[2]], stops)
    assert answer[:4] == [7] * 4 and set(answer) <= {7, END_OF_TURN}
    never = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=(7,))
    assert engine.generate([make_prompts()[2]], never) == [[7] * 9]


def test_an_answer_without_a_token_left_fails_alone(model_dir: Path) -> None:
    loader = GrammarLoader(model_dir / "tokenizer.json", VOCAB_SIZE, (END_OF_TURN,), lambda _: None)
    held = SlotMatchers(loader, VOCAB_SIZE, eos_token_ids=(END_OF_TURN,))
    state = SamplingState(2, VOCAB_SIZE)
    slots, none = np.array([0, 1]), np.empty(0, np.int32)
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=(7, 8), bad_words_token_ids=((8,), (7, 7))
    )
    for slot in (0, 1):
        state.admit(slot, params, np.array([3], np.int32), 0)
    held.restrict(0, params, none)
    held.restrict(1, params, np.array([7], np.int32))
    mask = held.mask(slots)
    assert held.failed(slots) == {1}
    drawn = sample(state, torch.zeros(2, VOCAB_SIZE), slots, torch.tensor([1, 1]), mask)
    assert drawn.token_ids[0] == 7
    held.advance(slots[:1], np.array([7], np.int32))
    held.mask(slots[:1])
    assert held.failed(slots) == {0, 1}
    for slot in (0, 1):
        held.release(slot)
    assert held.mask(slots) is None and held.failed(slots) == set()
