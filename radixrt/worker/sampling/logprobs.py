"""Log-probabilities of tokens under the model itself, before any sampling setting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import SlotLogprobs
from radixrt_kernels import available


def raw_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens and of the likeliest ones.

    Args:
        logits: float32 [n, vocab].
        token_ids: int64 [n], the given token of each position.
        num_top: number of the likeliest tokens to add.

    Returns:
        Token ids, int64 [n, 1 + num_top], and their log-probabilities, float32 alike: first the
        given token, then the likeliest in descending order (the given one again, if it is among
        them).
    """
    num_top = min(num_top, logits.shape[-1])
    top = logits.topk(num_top, dim=-1)
    chosen = token_ids.unsqueeze(-1)
    ids = torch.cat([chosen, top.indices], dim=-1)
    values = torch.cat([logits.gather(-1, chosen), top.values], dim=-1)
    return ids, values - _log_sum_exp(logits).unsqueeze(-1)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """[n, vocab] -> [n]; on a CPU by a kernel whose rows do not depend on one another."""
    if logits.is_cpu and available():
        from radixrt_kernels.sampler import log_sum_exp

        return log_sum_exp(logits)
    return logits.logsumexp(-1)


def logprob_rows(
    token_ids: Tensor, logprobs: Tensor, slots: Sequence[int], num_top: Sequence[int]
) -> list[SlotLogprobs]:
    """The result of :func:`raw_logprobs` as messages, each with as many tokens as its slot asked
    for."""
    columns = zip(slots, num_top, token_ids.tolist(), logprobs.tolist(), strict=True)
    return [
        SlotLogprobs(slot, pack_ids(ids[: 1 + top]), values[: 1 + top])
        for slot, top, ids, values in columns
    ]


def prompt_logprob_rows(
    token_ids: Tensor, logprobs: Tensor, slot: int, num_top: int
) -> list[SlotLogprobs]:
    """The result of :func:`raw_logprobs` for consecutive positions of one sequence's prompt, one
    message each."""
    count = len(token_ids)
    return logprob_rows(token_ids, logprobs, [slot] * count, [num_top] * count)
