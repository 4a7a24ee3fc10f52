"""Which of several texts is the likeliest? From the log-probabilities of their tokens, by one of three methods."""

from collections.abc import Sequence
from statistics import fmean

from radixrt.lang.backends.protocol import Score
from radixrt.lang.expressions import SelectMethod


def likeliest(scores: Sequence[Score], method: SelectMethod) -> int:
    """The index of the choice that the method takes; of equals, the first."""
    keys = [_key(score, method, _most_tokens(scores)) for score in scores]
    return keys.index(max(keys))


def _key(score: Score, method: SelectMethod, length: int) -> tuple[float, ...]:
    """What makes one choice better than another."""
    if method == "greedy_token_selection":
        # A choice that has ended goes on as well as it did on average: it neither wins nor loses by its length.
        missing = length - len(score.logprobs)
        return (*score.logprobs, *[fmean(score.logprobs)] * missing)
    if method == "unconditional_likelihood_normalized":
        return (fmean(score.logprobs) - fmean(score.unconditional),)
    return (fmean(score.logprobs),)


def _most_tokens(scores: Sequence[Score]) -> int:
    return max(len(score.logprobs) for score in scores)
