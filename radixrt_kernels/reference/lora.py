"""Low-rank adapters of linear layers, in float64."""

from collections.abc import Sequence

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


def add_lora_of_parts(
    hidden: torch.Tensor,
    adapters: torch.Tensor,
    down: torch.Tensor,
    ups: Sequence[torch.Tensor],
    output: torch.Tensor,
) -> torch.Tensor:
    """:func:`add_lora` of each part of a merged layer, side by side.

    Args:
        down: [adapters, parts, rank, columns]
        ups: [adapters, rows of the part, rank] of each part
    """
    outputs = output.split([up.shape[1] for up in ups], dim=1)
    parts = [
        add_lora(hidden, adapters, down[:, part], up, own)
        for part, (up, own) in enumerate(zip(ups, outputs, strict=True))
    ]
    return torch.cat(parts, dim=1)
