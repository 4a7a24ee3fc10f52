"""The margin by which tests on a GPU compare answers tells a rounding from another draw."""

import pytest
import torch

from radixrt.worker.sampling.noise import gumbel_noise, seed_keys
from tests.near_ties import SampledAnswer, gap_at_first_difference

VOCAB, SEED, POSITION = 5000, 7, 101


def draw(logits: torch.Tensor, seed: int = SEED) -> SampledAnswer:
    """One token a row of logits, as the sampler draws it."""
    logprobs = logits.log_softmax(-1)
    positions = POSITION + torch.arange(len(logits))
    keys = seed_keys(torch.tensor(seed)).expand(len(logits))
    tokens = (logprobs + gumbel_noise(keys, positions, torch.arange(VOCAB))).argmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return SampledAnswer(tokens.tolist(), chosen.tolist())


def gap(first: SampledAnswer, second: SampledAnswer) -> float:
    return gap_at_first_difference(first, second, seed=SEED, position=POSITION)


def test_a_rounding_of_the_logits_is_a_small_gap_and_another_seed_a_large_one() -> None:
    generator = torch.Generator().manual_seed(0)
    flips = 0
    for _ in range(100):
        logits = torch.randn(8, VOCAB, generator=generator)
        answer, rounded = draw(logits), draw(logits.bfloat16().float())
        flips += answer != rounded and answer.token_ids != rounded.token_ids
        assert gap(answer, answer) == 0
        assert gap(answer, rounded) < 0.05
        assert gap(answer, draw(logits, SEED + 1)) > 1
    assert flips > 0, "no near-tie has flipped, so nothing was tested"


def test_answers_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(AssertionError):
        gap(SampledAnswer([1], [0.0]), SampledAnswer([1, 2], [0.0, 0.0]))
