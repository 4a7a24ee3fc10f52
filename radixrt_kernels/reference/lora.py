"""Low-rank adapters of linear layers, in float64."""

import torch


def add_lora(
    hidden: torch.Tensor,
    adapters: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """
    Args:
        hidden: [num_tokens, columns]
        adapters: int64 [num_tokens], the adapter of each token; the number of adapters: none
        down: [adapters, rank, columns]
        up: [adapters, rows, rank]
        output: [num_tokens, rows], to which the product is added

    Returns:
        [num_tokens, rows], rounded once
    """
    sums = output.double()
    for token, adapter in enumerate(adapters.tolist()):
        if adapter < len(down):
            sums[token] += up[adapter].double() @ (down[adapter].double() @ hidden[token].double())
    return sums.to(output.dtype)
