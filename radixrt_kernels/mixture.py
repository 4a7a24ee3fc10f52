"""Operations of a mixture of experts besides its products: select experts, sort tokens by expert,
weighted sum.

The products are ``grouped_linear`` of :mod:`radixrt_kernels.linear` and
:mod:`radixrt_kernels.groupwise`. The kernels read the selected experts at run time, so a tape of
these calls can be replayed for other tokens.
"""

from dataclasses import dataclass

import torch

from radixrt_kernels import native, trace

if native is not None:
    _choose_experts, _group_by_expert = native.choose_experts, native.group_by_expert
    _weighted_sum = native.weighted_sum


def choose_experts(
    logits: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the experts with the largest logits, in descending order; of equal logits the lower
    expert first.

    Args:
        logits: [num_tokens, num_experts] float32, bfloat16 or float16
        top_k: experts per token
        normalize: True: weights are the softmax over the selected experts; False: over all experts

    Returns:
        weights float32 and experts int64, both [num_tokens, top_k]
    """
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    experts = logits.new_empty(shape, dtype=torch.int64)
    trace.call(_choose_experts, logits, normalize, weights, experts)
    return weights, experts


@dataclass(frozen=True, slots=True)
class Groups:
    """The (token, choice) pairs of a batch, sorted by expert."""

    starts: (
        torch.Tensor
    )  # int32 [num_experts + 1]; the pairs of expert i are starts[i] to starts[i + 1]
    tokens: torch.Tensor  # int32 [pairs]
    places: torch.Tensor  # int32 [num_tokens, top_k]: position of each pair

    def first(self, count: int) -> "Groups":
        """The groups of the first ``count`` experts. Pairs of others have the position behind the
        last of these. Not for a tape: the shape of ``tokens`` depends on the experts."""
        starts = self.starts[: count + 1]
        pairs = int(starts[-1])
        return Groups(starts, self.tokens[:pairs], self.places.clamp(max=pairs))


def group_by_expert(experts: torch.Tensor, num_experts: int) -> Groups:
    """Sort the (token, choice) pairs of ``experts`` int64 [num_tokens, top_k] by expert. The sort
    is stable."""
    starts = experts.new_empty(num_experts + 1, dtype=torch.int32)
    tokens = experts.new_empty(experts.numel(), dtype=torch.int32)
    places = experts.new_empty(experts.shape, dtype=torch.int32)
    trace.call(_group_by_expert, experts, starts, tokens, places)
    return Groups(starts, tokens, places)


def count_by_expert(experts: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the (token, choice) pairs of each expert, int64 [num_tokens, top_k], to ``counts``, int64
    [num_experts]."""
    trace.call(_count_by_expert, experts, counts)


def _count_by_expert(experts: torch.Tensor, counts: torch.Tensor) -> None:
    counts += torch.bincount(experts.flatten(), minlength=len(counts))


def weighted_sum(values: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute ``weights[token] @ values[places[token]]`` for each token, summed in float32 and
    rounded once.

    Args:
        values: [rows, size]
        places, weights: int32 and float32, both [num_tokens, top_k]

    Returns:
        [num_tokens, size] of the dtype of ``values``
    """
    output = values.new_empty((places.shape[0], values.shape[1]))
    trace.call(_weighted_sum, values, places, weights, output)
    return output
