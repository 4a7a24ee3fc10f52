"""Computes the random noise of sampling as a hash of (seed, position, token id).

So there is no generator state to keep, to restore after a retraction, or to keep apart between the
sequences of a batch. The argmax of log-probabilities plus Gumbel noise is a sample from them (the
Gumbel-max trick, Maddison et al. 2014). Against inverting the cumulative distribution, this costs a
hash per candidate, and is worth it: a rounding error somewhere in the logits moves the choice only
between tokens that were nearly tied.
"""

import torch
from torch import Tensor

_INT32 = 2**32
_INT64 = 2**64


def _signed(value: int, modulus: int) -> int:
    """An unsigned constant as the signed integer with the same bits; tensors have no unsigned
    ones."""
    return value - modulus if value >= modulus // 2 else value


# Multipliers of splitmix64 (Steele et al. 2014) and of the 32-bit mixer with the lowest known bias
# (Wellons' hash prospector, "lowbias32"); the additive constants are 2**64 and 2**32 over the
# golden ratio.
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, _INT64)
_MIX_64 = (_signed(0xBF58476D1CE4E5B9, _INT64), _signed(0x94D049BB133111EB, _INT64))
_GOLDEN_32 = _signed(0x9E3779B9, _INT32)
_MIX_32 = (0x7FEB352D, _signed(0x846CA68B, _INT32))


def seed_keys(seeds: Tensor) -> Tensor:
    """The part of the hash that depends on the seed alone: int64 [rows] -> int64 [rows]. It is
    computed once per sequence."""
    return _mix_64(seeds + _GOLDEN_64)


def gumbel_noise(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise that is a pure function of (seed, position, token id).

    >>> keys, positions = seed_keys(torch.tensor([1, 1, 2])), torch.tensor([5, 5, 5])
    >>> noise = gumbel_noise(keys, positions, torch.arange(4))
    >>> noise.shape, torch.equal(noise[0], noise[1]), torch.equal(noise[0], noise[2])
    (torch.Size([3, 4]), True, False)
    >>> torch.equal(gumbel_noise(keys, positions, torch.tensor([3])), noise[:, 3:])
    True

    Args:
        keys: int64 [rows], the seeds' :func:`seed_keys`.
        positions: int64 [rows], of the token being sampled in its sequence.
        token_ids: int32 or int64, [rows, n], or [n] for the same tokens in all rows.

    Returns:
        float32 [rows, n], between about -2.8 and 22.2. Integer arithmetic wraps alike on every
        device; the two logarithms may differ between devices in the last bit.
    """
    halves = _mix_64(positions * _GOLDEN_64 + keys).unsqueeze(-1).view(torch.int32)  # [rows, 2]
    bits = token_ids.to(torch.int32) * _GOLDEN_32 + halves[:, :1]  # [rows, n]
    bits ^= _shift_right(bits, 16, width=32)
    bits *= _MIX_32[0]
    bits ^= _shift_right(bits, 15, width=32)
    # A second key inside the mixer: else two rows would see the same noise, only at shifted token
    # ids.
    bits += halves[:, 1:]
    bits *= _MIX_32[1]
    bits ^= _shift_right(bits, 16, width=32)
    bits &= 0x7FFFFFFF
    # Minus a uniform number from (0, 1). Only the largest noise matters for sampling, so the
    # dense end of the floats is put there; the other end is kept away from log1p(-1).
    noise = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return noise.log1p_().neg_().log_().neg_()


def _mix_64(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30, width=64)) * _MIX_64[0]
    bits = (bits ^ _shift_right(bits, 27, width=64)) * _MIX_64[1]
    return bits ^ _shift_right(bits, 31, width=64)


def _shift_right(bits: Tensor, by: int, *, width: int) -> Tensor:
    """A shift that moves in zeros; that of signed tensors moves in the sign."""
    return (bits >> by).bitwise_and_((1 << (width - by)) - 1)
