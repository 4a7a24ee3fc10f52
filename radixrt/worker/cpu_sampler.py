"""The step's tokens by the native kernel: the CPU's form of what :mod:`radixrt.worker.sampler` says, without a sort."""

import torch
from torch import Tensor

from radixrt.worker.grammars import TokenMask
from radixrt.worker.sampling_state import SamplingBatch


def draw_by_native_kernel(
    batch: SamplingBatch, logits: Tensor, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor]:
    """Token ids [rows] int64, and each row's largest logit [rows] float32, NaN where one is not finite.

    Args:
        batch: with ``packed`` settings.
        logits: [rows, vocab] float32, penalties and biases included.
        positions: [rows] int64
        mask: what constrained rows may sample.
    """
    from radixrt_kernels.sampler import draw_tokens

    assert batch.packed is not None
    if mask is None:
        return draw_tokens(logits, batch.packed, positions)
    masked = (torch.from_numpy(mask.rows), torch.from_numpy(mask.bits))
    return draw_tokens(logits, batch.packed, positions, masked)
