"""The kept mass of whole answers, through the real scheduler and worker, against brute force over
the vocabulary."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.loader import load_model
from tests.checkpoints import END_OF_TURN
from tests.engine.in_process import InProcessEngine
from tests.models.harness import Harness

LENGTH = 24
PROMPTS = [[5 + j, 9, 100, 31] * (2 + j) for j in range(4)]


def settings_of(index: int) -> SamplingParams:
    temperature = 0.0 if index % 2 else 1.3
    return SamplingParams(
        temperature=temperature,
        seed=index,
        max_tokens=60,
        kept_mass=True,
        logprobs=[None, 1][index % 2],
    )


@pytest.fixture(scope="module")
def expected(
    model_dir: Path, facts: TokenizerFacts
) -> Callable[[list[int], list[int]], list[float]]:
    """By brute force: a token is allowed behind a text of the pattern ``(ab|a|b|c){LENGTH...}`` if
    its characters are, and the end only behind all of them."""
    model = load_model(model_dir)

    def masses(prompt: list[int], answer: list[int]) -> list[float]:
        logits = Harness(model, 16).logits(prompt + answer)[len(prompt) - 1 : -1].double()
        text, found = b"", []
        for token, row in zip(answer, logits.softmax(-1), strict=True):
            fits = [
                bool(piece) and set(piece) <= set(b"abc") and len(text + piece) <= LENGTH
                for piece in facts.tokens
            ]
            fits[END_OF_TURN] = len(text) == LENGTH
            found.append(float(row[: len(fits)][torch.tensor(fits)].sum()))
            assert fits[token]
            text += facts.tokens[token]
        return found

    return masses


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_masses_equal_brute_force_cold_cached_batched_and_speculated(
    model_dir: Path,
    facts: TokenizerFacts,
    expected: Callable[[list[int], list[int]], list[float]],
    speculation: str,
) -> None:
    engine = InProcessEngine(model_dir, speculation=speculation)
    use = engine.use(llguidance.compile_regex(f"[abc]{{{LENGTH}}}", facts))
    settings = [settings_of(index) for index in range(len(PROMPTS))]
    runs = []
    for _ in range(3):  # later ones from the cache, where drafts come from the tree
        answers = engine.generate(PROMPTS, settings, grammars=[use] * len(PROMPTS))
        runs.append([[row.log_kept_mass for row in rows] for rows in engine.logprobs])
        for prompt, answer, logs in zip(PROMPTS, answers, runs[-1], strict=True):
            assert len(logs) == len(answer) and answer[-1] == END_OF_TURN
            masses = expected(prompt, answer)
            assert [*map(math.exp, logs)] == pytest.approx(masses, abs=1e-5)
            assert 0 < min(masses) < 0.9
    assert runs[0] == runs[1] == runs[2]
    alone = engine.generate(PROMPTS[:1], settings[:1], grammars=[use])
    assert alone[0] == answers[0]
    assert [row.log_kept_mass for row in engine.logprobs[0]] == runs[0][0]
    if speculation == "auto":
        assert sum(engine.scheduler.state.counters.accepted_draft_tokens.values()) > 0


def test_forced_tokens_have_masses_and_the_answer_is_the_same(
    model_dir: Path, facts: TokenizerFacts
) -> None:
    engine = InProcessEngine(model_dir)
    use = engine.use(llguidance.compile_regex("(first|second) (hand|class)", facts))
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    (jumping,) = engine.generate(PROMPTS[:1], plain, grammars=[use])
    assert engine.scheduler.state.counters.forced_tokens > 0
    asking = msgspec.structs.replace(plain, kept_mass=True)
    (answer,) = engine.generate(PROMPTS[:1], asking, grammars=[use])
    assert answer == jumping and len(engine.logprobs[0]) == len(answer)
    assert all(row.log_kept_mass < 0 and not row.logprobs for row in engine.logprobs[0])


def test_without_a_constraint_everything_is_kept(model_dir: Path) -> None:
    engine = InProcessEngine(model_dir)
    engine.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=5, kept_mass=True))
    assert {row.log_kept_mass for row in engine.logprobs[0]} == {0.0}
    restricted = SamplingParams(
        temperature=0.0, max_tokens=5, kept_mass=True, allowed_token_ids=(20, 21)
    )
    engine.generate(PROMPTS[:1], restricted)
    assert all(row.log_kept_mass < 0 for row in engine.logprobs[0])
