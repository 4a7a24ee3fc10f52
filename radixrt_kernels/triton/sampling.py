"""Samples one token per row of logits in one launch: grammar mask, temperature, top-k, top-p,
min-p, one draw.

Rows are not sorted. Top-k and top-p are thresholds on the value, found by bisection over the 32
bits of a float: each step counts (or weighs) the values above the middle. Before the bisection,
candidates are collected, so that it reads some hundred numbers instead of a vocabulary. Two facts
bound the candidates: the k-th largest of the maxima of any partition of a row is at most the row's
k-th largest value; a token with less than (1 - top_p) / vocab of the probability is outside every
nucleus.

One program processes a row in a fixed order, so the same logits give the same token in any slot and
any batch. The reference is ``radixrt.worker.sampling.sampler``.
"""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of
from radixrt_kernels.triton.noise import gumbel_noise

BLOCK = 4096
"""Numbers that a program processes together."""

CANDIDATES = 8192
"""Maximum number of candidates; with more candidates, the bisection reads the whole row."""

SETTINGS = 6
"""Columns of the packed settings, int32: temperature, top_k, top_p, log_min_p, low and high half of
the seed key. Floats are stored as their bits. Temperature 0: greedy; top_p above 1 and top_k >=
vocab: no limit."""


@triton.jit
def _order(values):
    """Integers with the same order as the floats."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """The middle, rounded up; the difference of two int32 has 33 bits."""
    return (low + ((high.to(tl.int64) - low.to(tl.int64) + 1) >> 1)).to(tl.int32)


@triton.jit
def _is_allowed(bits, token, inside):
    word = tl.load(bits + (token >> 5), mask=inside, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _scaled(row_logits, bits, token, vocab, temperature, MASKED: tl.constexpr):
    """Logits of tokens divided by the temperature; minus infinity for masked tokens and after the
    vocabulary."""
    inside = token < vocab
    value = tl.load(row_logits + token, mask=inside, other=float("-inf"))
    if MASKED:
        value = tl.where(_is_allowed(bits, token, inside), value, float("-inf"))
    return (
        tl.div_rn(value, temperature) + 0.0
    )  # no negative zeros: they compare equal but have a different order


@triton.jit
def _kth_largest(values, length, k, low, high, BLOCK: tl.constexpr):
    """The order of the k-th largest of ``values[:length]``, which is in low..high; low if there are
    fewer than k."""
    lane = tl.arange(0, BLOCK)
    while low < high:
        middle = _middle(low, high)
        above = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, length, BLOCK):
            value = tl.load(values + start + lane, mask=start + lane < length, other=float("-inf"))
            above += (_order(value) >= middle).to(tl.int32)
        if tl.sum(above, axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _kth_largest_lane(lanes, k, low, high):
    """Same as _kth_largest, for values in registers."""
    order = _order(lanes)
    while low < high:
        middle = _middle(low, high)
        if tl.sum((order >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _mass_from(values, length, peak, order, BLOCK: tl.constexpr):
    """The sum of ``exp(value - peak)`` over the values with an order of at least ``order``."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        value = tl.load(values + start + lane, mask=start + lane < length, other=float("-inf"))
        mass += tl.where(_order(value) >= order, tl.exp(value - peak), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _nucleus(values, length, peak, wanted, low, high, BLOCK: tl.constexpr):
    """The order of the largest value such that all values from it upwards have a mass of at least
    ``wanted``."""
    while low < high:
        middle = _middle(low, high)
        if _mass_from(values, length, peak, middle, BLOCK) < wanted:
            high = middle - 1
        else:
            low = middle
    return low


@triton.jit
def _survey(row_logits, bits, vocab, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Read the row's logits once.

    Returns:
        per lane the largest allowed logit and its first token, [BLOCK] each; the row's
        largest logit before the mask, NaN if any is NaN
    """
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = lane
    peak = best
    unordered = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        value = tl.load(row_logits + token, mask=inside, other=float("-inf"))
        unordered |= (value != value).to(tl.int32)
        peak = tl.maximum(peak, value)
        if MASKED:
            value = tl.where(_is_allowed(bits, token, inside), value, float("-inf"))
        better = value > best
        best = tl.where(better, value, best)
        best_token = tl.where(better, token, best_token)
    row_peak = tl.max(peak, axis=0)
    row_peak = tl.where(tl.max(unordered, axis=0) > 0, float("nan"), row_peak)
    return best, best_token, row_peak


@triton.jit
def _lowest_order(
    row_logits, bits, lanes, vocab, temperature, top_k, top_p, peak,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A lower bound of the orders that top-k and top-p keep, and the mass of the whole row if top-p
    needs it."""
    least = _order(tl.full((), float("-inf"), tl.float32))
    high = _order(peak)
    mass = tl.full((), 0.0, tl.float32)
    bound = least
    if top_k < vocab:
        if top_k <= BLOCK:
            bound = _kth_largest_lane(lanes, top_k, least, high)
    else:
        lane = tl.arange(0, BLOCK)
        masses = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            value = _scaled(row_logits, bits, start + lane, vocab, temperature, MASKED)
            masses += tl.exp(value - peak)
        mass = tl.sum(masses, axis=0)
        tail = tl.maximum((1.0 - top_p) * mass / vocab, 1e-37)
        bound = _order(peak + tl.log(tail) - 1e-3)
    return bound, mass


@triton.jit
def _collect(
    row_logits, bits, vocab, temperature, bound, values, tokens, capacity,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the scaled logits with an order of at least ``bound``, and their tokens, up to the
    buffer's size.

    Returns:
        their number, which may exceed the buffer's size
    """
    lane = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + lane
        value = _scaled(row_logits, bits, token, vocab, temperature, MASKED)
        wanted = (_order(value) >= bound) & (value > float("-inf"))
        place = count + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        fits = wanted & (place < capacity)
        tl.store(values + place, value, mask=fits)
        tl.store(tokens + place, token, mask=fits)
        count += tl.sum(wanted.to(tl.int32), axis=0)
    return count


@triton.jit
def _draw_kernel(
    logits, settings, positions, mask_rows, mask_bits, mask_words,
    candidate_values, candidate_tokens, token_ids, peaks, vocab, capacity,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * vocab
    lane = tl.arange(0, BLOCK)
    bits = mask_bits
    if MASKED:
        # Row 0 of the bits allows every token, so rows without a grammar need no branch.
        bits += (tl.load(mask_rows + row).to(tl.int64) + 1) * mask_words
    best, best_token, row_peak = _survey(row_logits, bits, vocab, MASKED, BLOCK)
    tl.store(peaks + row, row_peak)
    largest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == largest, best_token, vocab - 1), axis=0)

    row_settings = settings + row * SETTINGS
    temperature = tl.load(row_settings).to(tl.float32, bitcast=True)
    if temperature > 0:
        top_k = tl.load(row_settings + 1)
        top_p = tl.load(row_settings + 2).to(tl.float32, bitcast=True)
        log_min_p = tl.load(row_settings + 3).to(tl.float32, bitcast=True)
        low_half = tl.load(row_settings + 4).to(tl.uint32, bitcast=True).to(tl.uint64)
        high_half = tl.load(row_settings + 5).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed_key = (low_half | (high_half << 32)).to(tl.int64, bitcast=True)
        position = tl.load(positions + row)

        peak = tl.div_rn(largest, temperature) + 0.0
        threshold = _order(peak + log_min_p)
        compact = (top_k < vocab) | (top_p <= 1.0)
        length = vocab
        values = candidate_values + row * capacity
        tokens = candidate_tokens + row * capacity
        if compact:
            lanes = tl.div_rn(best, temperature) + 0.0
            bound, mass = _lowest_order(
                row_logits, bits, lanes, vocab, temperature, top_k, top_p, peak, MASKED, BLOCK
            )
            length = _collect(
                row_logits, bits, vocab, temperature, bound, values, tokens, capacity, MASKED, BLOCK
            )
            compact = length <= capacity
            if not compact:
                for start in range(0, vocab, BLOCK):
                    token = start + lane
                    value = _scaled(row_logits, bits, token, vocab, temperature, MASKED)
                    tl.store(row_logits + token, value, mask=token < vocab)
                values = row_logits
                length = vocab
            tl.debug_barrier()  # from here on, values written by other threads are read
            high = _order(peak)
            kept = tl.minimum(bound, high)
            if top_k < vocab:
                kept = _kth_largest(values, length, top_k, kept, high, BLOCK)
                mass = _mass_from(values, length, peak, kept, BLOCK)
            if top_p <= 1.0:
                kept = _nucleus(values, length, peak, top_p * mass, kept, high, BLOCK)
            threshold = tl.maximum(threshold, kept)

        scaled_already = (top_k < vocab) | (top_p <= 1.0)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_token = tl.full((BLOCK,), 0, tl.int32) + chosen
        for start in range(0, length, BLOCK):
            index = start + lane
            inside = index < length
            token = index
            if compact:
                token = tl.load(tokens + index, mask=inside, other=0)
            if scaled_already:
                value = tl.load(values + index, mask=inside, other=float("-inf"))
            else:
                value = _scaled(row_logits, bits, index, vocab, temperature, MASKED)
            noisy = value + gumbel_noise(seed_key, position, token)
            noisy = tl.where(_order(value) >= threshold, noisy, float("-inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            best_token = tl.where(better, token, best_token)
        largest = tl.max(best, axis=0)
        chosen = tl.min(tl.where(best == largest, best_token, vocab - 1), axis=0)
    tl.store(token_ids + row, chosen.to(tl.int64))


def draw_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    positions: torch.Tensor,
    mask_rows: torch.Tensor | None = None,
    mask_bits: torch.Tensor | None = None,
    *,
    block: int = BLOCK,
    candidates: int = CANDIDATES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row. Launches one kernel and does not wait for it.

    Args:
        logits: [rows, vocab] float32, contiguous; may be overwritten.
        settings: [rows, SETTINGS] int32
        positions: [rows] int64, position of the sampled token in its sequence
        mask_rows: [rows] int32, index of each row's mask; -1: no mask
        mask_bits: [1 + n, words] int32; bit ``i % 32`` of word ``i // 32`` allows token ``i``. Row
            0 is all ones; mask ``m`` is row ``m + 1``.
        block, candidates: BLOCK and CANDIDATES; smaller in tests

    Returns:
        token ids [rows] int64; the largest logit of each row [rows] float32, NaN if the row has a
        NaN
    """
    rows, vocab = logits.shape
    capacity = min(candidates, vocab)
    device = logits.device
    values = torch.empty((rows, capacity), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, capacity), dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    peaks = torch.empty(rows, dtype=torch.float32, device=device)
    masked = mask_rows is not None and mask_bits is not None
    if rows:
        _draw_kernel[(rows,)](
            logits, settings, positions,
            mask_rows if masked else settings, mask_bits if masked else settings,
            mask_bits.shape[1] if mask_bits is not None else 0,
            values, tokens, token_ids, peaks, vocab, capacity,
            MASKED=masked, BLOCK=block_of(vocab, block), SETTINGS=SETTINGS, num_warps=16,
        )  # fmt: skip
    return token_ids, peaks
