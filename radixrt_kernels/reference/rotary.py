"""Rotary position embedding (Su et al., 2021) on the first features of each head."""

import torch


def rotated(states: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of features (i, i + half), as a complex number, by its angle.

    Args:
        states: [num_tokens, heads, head_dim]
        positions: [num_tokens]
        cos_sin: [context_length, rotary_dim] cosines then sines
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    first, second = states[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    rotated = torch.cat((turned.real, turned.imag), dim=-1).to(states.dtype)
    return torch.cat((rotated, states[..., rotary_dim:]), dim=-1)
