"""The next token of each row of logits: mask, temperature, top-k, top-p, min-p and the draw, without a sort.

The same choice as ``radixrt.worker.sampling.sampler`` makes in torch, which says what the settings mean.
"""

import torch

from radixrt_kernels import native

if native is not None:
    _sample = native.sample


def draw_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    positions: torch.Tensor,
    mask: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row.

    Args:
        logits: float32 [rows, vocab], not changed.
        settings: int32 [rows, 6]: the bits of temperature (float32; 0: take the largest logit), top_k (the vocabulary's
            size: no limit), top_p (float32; above 1: no limit), the logarithm of min_p (float32; minus infinity: no limit), and
            the seed's key of ``radixrt.worker.sampling.noise``, low half first.
        positions: int64 [rows], the position in its sequence that each token will have.
        mask: int64 [n], the rows that are masked, and int32 [n, ceil(vocab / 32)], a bit for each token they may take.

    Returns:
        (token ids int64 [rows], each row's largest logit float32 [rows]: NaN where one is not finite)
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    peaks = torch.empty(len(logits))
    _sample(logits, settings, positions, mask, token_ids, peaks)
    return token_ids, peaks
