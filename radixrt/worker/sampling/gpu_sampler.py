"""Draws a step's tokens by Triton kernels, as :mod:`radixrt.worker.sampling.sampler` defines them,
without a sort and without waiting for the device."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import Device
from radixrt.worker.sampling.forbidden_paths import ALL_TOKENS
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.state import SamplingBatch, TokenCounts


def draw_in_one_kernel(
    batch: SamplingBatch,
    counts: TokenCounts,
    logits: Tensor,
    positions: Tensor,
    mask: TokenMask | None,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """See ``radixrt.worker.sampling.sampler.Draw``."""
    from radixrt_kernels.triton.penalties import penalise
    from radixrt_kernels.triton.sampling import draw_tokens

    penalised = batch.penalised
    if penalised is not None:
        penalise(
            logits,
            penalised.rows,
            penalised.counts_rows,
            penalised.repetition,
            penalised.presence,
            penalised.frequency,
            counts.in_prompt,
            counts.in_output,
        )
    if batch.biases is not None:
        batch.biases.add_to(logits, positions)
    if mask is None:
        return draw_tokens(logits, batch.packed, positions)
    mask_rows, mask_bits = device.upload(*_with_a_free_row(mask, len(logits)))
    return draw_tokens(logits, batch.packed, positions, mask_rows, mask_bits)


def _with_a_free_row(mask: TokenMask, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Convert a mask to the kernel's form.

    Returns:
        ``mask_rows`` [rows]: index of each row's bits, -1 without a mask. ``bits`` [1 + n, words]:
        row 0 allows all tokens, and the rows of the mask follow.
    """
    mask_rows = np.full(rows, -1, dtype=np.int32)
    mask_rows[mask.rows] = np.arange(len(mask.rows), dtype=np.int32)
    bits = np.empty((1 + len(mask.rows), mask.bits.shape[1]), dtype=np.int32)
    bits[0] = ALL_TOKENS
    bits[1:] = mask.bits
    return mask_rows, bits
