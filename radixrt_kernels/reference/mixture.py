"""Operations of a mixture of experts besides its products: full sorts, and sums in float64."""

import torch


def choose_experts(
    logits: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens, num_experts] -> weights float32 and experts int64, both [num_tokens, top_k]"""
    exact = logits.double()
    largest, order = exact.sort(dim=-1, descending=True, stable=True)
    weights = (largest[:, :top_k] if normalize else largest).softmax(dim=-1)
    return weights[:, :top_k].float(), order[:, :top_k]


def weighted_sum(values: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """values [rows, size], places and weights [num_tokens, top_k] -> [num_tokens, size]"""
    chosen = values.double()[places.long()]  # [num_tokens, top_k, size]
    return (chosen * weights.double().unsqueeze(-1)).sum(dim=1).to(values.dtype)
