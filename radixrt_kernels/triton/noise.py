"""Gumbel noise inside a kernel, with the same bits as :mod:`radixrt.worker.sampling.noise` for the
same arguments."""

import triton
import triton.language as tl


@triton.jit
def _mix_64(bits):
    """The finalizer of splitmix64 (Steele et al., 2014); uint64."""
    bits = (bits ^ (bits >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def gumbel_noise(seed_key, position, token_ids):
    """Standard Gumbel noise as a pure function of (seed, position, token id).

    Args:
        seed_key: int64, from ``radixrt.worker.sampling.noise.seed_keys``
        position: int64, position of the sampled token in its sequence
        token_ids: int32 [n]

    Returns:
        float32 [n]
    """
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix_64(
        position.to(tl.uint64, bitcast=True) * golden + seed_key.to(tl.uint64, bitcast=True)
    )
    first = (key & 0xFFFFFFFF).to(tl.uint32)
    second = (key >> 32).to(tl.uint32)
    # lowbias32 (Wellons' hash prospector), with a second key inside the mixer
    bits = token_ids.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32) + first
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) + second
    bits = bits * tl.full((), 0x846CA68B, tl.uint32)
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    return -tl.log(-_log1p_minus(uniform))


@triton.jit
def _log1p_minus(u):
    """log(1 - u) for u in (0, 1), with float32 precision also for small u, which give the largest
    noise."""
    s = u / (
        2.0 - u
    )  # log(1 - u) = -2 artanh(s); the next term of the series is below 2**-27 of the sum
    s2 = s * s
    series = 1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9))))
    return tl.where(u < 0.25, -2.0 * s * series, tl.log(1.0 - tl.maximum(u, 0.25)))
