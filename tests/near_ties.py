"""Whether two answers of one seed differ only where two tokens nearly tied."""

from dataclasses import dataclass

import torch

from radixrt.worker.sampling.noise import gumbel_noise, seed_keys


@dataclass(frozen=True)
class SampledAnswer:
    """At temperature 1, without top-k, top-p or penalties."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token, by the model's own logits."""


def gap_at_first_difference(
    first: SampledAnswer, second: SampledAnswer, *, seed: int, position: int
) -> float:
    """By how much the tokens differ where the answers first do: in log-probability plus the noise
    of the seed, whose maximum is the token that is drawn. 0: the answers are equal.

    Equal contexts have equal logits but for rounding, so the gap is that rounding. Tokens drawn by
    any other noise are apart by several: that of a winner among many tokens is far above the
    average.

    Args:
        position: of the answers' first token in its sequence.
    """
    assert len(first.token_ids) == len(second.token_ids)
    pairs = zip(first.token_ids, second.token_ids, strict=True)
    for index, tokens in enumerate(pairs):
        if tokens[0] != tokens[1]:
            keys = seed_keys(torch.tensor([seed]))
            noise = gumbel_noise(keys, torch.tensor([position + index]), torch.tensor(tokens))[0]
            logprobs = torch.tensor([first.logprobs[index], second.logprobs[index]])
            scores = logprobs + noise
            return float((scores[0] - scores[1]).abs())
    return 0.0
