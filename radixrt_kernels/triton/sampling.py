"""From a step's logits to a token a row in one launch: grammar mask, temperature, top-k, top-p, min-p, one draw.

No row is sorted. What top-k and top-p keep is decided by a threshold on the value, so it is found by
bisection: over the 32 bits of a float, each step counts (or weighs) what lies above the middle. Before
that, the few tokens that can matter are collected, so that the bisection reads some hundred numbers in
place of a vocabulary: the k-th largest of the maxima of any partition of a row is no larger than the row's
k-th largest, and what has less than (1 - top_p) / vocab of the probability is outside every nucleus.

A row is one program that walks its row in one order, whatever the batch: the same logits give the same
token in any slot. Which token says ``radixrt.worker.sampling.sampler``, the reference.
"""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of
from radixrt_kernels.triton.noise import gumbel_noise

BLOCK = 4096
"""Numbers that a program looks at together."""

CANDIDATES = 8192
"""How many tokens are collected at most; where more can matter, the whole row is bisected."""

SETTINGS = 6
"""Columns of the packed settings, int32: temperature, top_k, top_p, log_min_p, low and high half of the seed
key. The floats are there by their bits; temperature 0 is greedy, top_p above 1 and top_k >= vocab no limit."""


@triton.jit
def _order(values):
    """Integers that compare as the floats do."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """Halfway, rounded up: the difference of two int32 takes 33 bits."""
    return (low + ((high.to(tl.int64) - low.to(tl.int64) + 1) >> 1)).to(tl.int32)


@triton.jit
def _is_allowed(bits, token, inside):
    word = tl.load(bits + (token >> 5), mask=inside, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _scaled(row_logits, bits, token, vocab, temperature, MASKED: tl.constexpr):
    """Logits of some tokens over the temperature; minus infinity where the grammar or the vocabulary ends."""
    inside = token < vocab
    value = tl.load(row_logits + token, mask=inside, other=float("-inf"))
    if MASKED:
        value = tl.where(_is_allowed(bits, token, inside), value, float("-inf"))
    return (
        tl.div_rn(value, temperature) + 0.0
    )  # no negative zeros: they compare equal and order apart


@triton.jit
def _kth_largest(values, length, k, low, high, BLOCK: tl.constexpr):
    """The order of the k-th largest of ``values[:length]``, known to be in low..high; low where there are fewer."""
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
    """As _kth_largest, of numbers that are in registers."""
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
    """The sum of ``exp(value - peak)`` over the values whose order is at least ``order``."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        value = tl.load(values + start + lane, mask=start + lane < length, other=float("-inf"))
        mass += tl.where(_order(value) >= order, tl.exp(value - peak), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _nucleus(values, length, peak, wanted, low, high, BLOCK: tl.constexpr):
    """The order of the smallest value before which, from the largest on, less than ``wanted`` mass has come: the
    largest value from which on the mass is at least ``wanted``."""
    while low < high:
        middle = _middle(low, high)
        if _mass_from(values, length, peak, middle, BLOCK) < wanted:
            high = middle - 1
        else:
            low = middle
    return low


@triton.jit
def _survey(row_logits, bits, vocab, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """One pass over the row as the model gave it.

    Returns:
        for each lane the largest allowed logit and the first token that has it, [BLOCK] each; the row's
        largest logit before the mask, NaN where any is
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
    """An order that neither top-k nor top-p goes below, and the mass of the whole row where top-p needs it."""
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
    """Write the scaled logits of order ``bound`` or more, and their tokens, as far as there is room.

    Returns:
        how many there are, which may be more than there was room for
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
        # Row 0 of the bits allows everything: rows without a grammar need no branch.
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
            tl.debug_barrier()  # what other threads have written is read from here on
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
    """One token for each row. Launches one kernel and waits for nothing.

    Args:
        logits: [rows, vocab] float32, contiguous; may be overwritten.
        settings: [rows, SETTINGS] int32
        positions: [rows] int64, of the sampled token in its sequence.
        mask_rows: [rows] int32, which row of the bits holds for each row; -1: it may sample every token.
        mask_bits: [1 + n, words] int32, bit ``i`` of word ``i // 32`` allows a token; row 0 is all ones and
            stands before the rows that ``mask_rows`` counts from 0.
        block, candidates: as BLOCK and CANDIDATES; smaller in tests.

    Returns:
        token ids [rows] int64; the rows' largest logits [rows] float32, NaN where a row holds one
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
