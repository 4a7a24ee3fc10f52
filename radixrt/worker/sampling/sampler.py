"""Draws one token a row from a step's logits: one a sequence, and one behind each draft token.

The order is the field's: penalties, then biases, then the grammars' mask, then temperature, then
top-k, top-p and min-p, then one draw by the Gumbel-max trick with the noise of
:mod:`radixrt.worker.sampling.noise`. The PyTorch form here works row by row; it is the reference of
the CPU's and the GPU's kernels, and serves where they are missing. Log-probabilities are those
under the model itself, before any sampling setting.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device.device import Device
from radixrt.messages.ids import TokenIds, pack_ids
from radixrt.messages.steps import NO_TOKEN, SlotLogprobs
from radixrt.worker.drafts.verification import rows_to_keep
from radixrt.worker.sampling.matchers import NO_ROWS, TokenMask
from radixrt.worker.sampling.noise import gumbel_noise
from radixrt.worker.sampling.restrictions import ALL_TOKENS
from radixrt.worker.sampling.state import (
    DRAW_SETTINGS,
    LogprobRows,
    PenalisedRows,
    SamplingBatch,
    SamplingState,
    TokenCounts,
)
from radixrt_kernels import available


def raw_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens and of the likeliest ones.

    Args:
        logits: float32 [n, vocab].
        token_ids: int64 [n], the given token of each position.
        num_top: number of the likeliest tokens to add.

    Returns:
        Token ids, int64 [n, 1 + num_top], and their log-probabilities, float32 alike: first the
        given token, then the likeliest in descending order (the given one again, if it is among
        them).
    """
    num_top = min(num_top, logits.shape[-1])
    top = logits.topk(num_top, dim=-1)
    chosen = token_ids.unsqueeze(-1)
    ids = torch.cat([chosen, top.indices], dim=-1)
    values = torch.cat([logits.gather(-1, chosen), top.values], dim=-1)
    return ids, values - _log_sum_exp(logits).unsqueeze(-1)


def log_kept_masses(
    logits: Tensor, asked: LogprobRows, mask: TokenMask | None, device: Device
) -> Tensor:
    """The logarithm of the probability that the mask leaves in each row that asks for it.

    Args:
        logits: float32 [rows, vocab] of the batch, as the model gave them; not changed.

    Returns:
        float32 [n] of the rows ``asked``; 0 where a row has no mask, or does not ask
    """
    masses = logits.new_zeros(len(asked.on_host))
    if mask is None or not len(mask.rows):
        return masses
    places = np.searchsorted(mask.rows, asked.on_host).clip(max=len(mask.rows) - 1)
    own = np.flatnonzero(asked.kept_mass & (mask.rows[places] == asked.on_host))
    if not len(own):
        return masses
    rows, bits = asked.on_host[own], mask.bits[places[own]]
    if logits.is_cpu and available():
        from radixrt_kernels.sampler import log_kept_mass

        masses[own] = log_kept_mass(logits, torch.from_numpy(rows), torch.from_numpy(bits))
        return masses
    there, rows_there = device.upload(own, rows)
    shifted = logits[rows_there]
    shifted -= shifted.amax(dim=-1, keepdim=True)  # so that float32 rounds the sums little
    whole = shifted.logsumexp(-1)
    _keep_allowed(shifted, TokenMask(np.arange(len(own)), bits), device)
    masses[there] = (shifted.logsumexp(-1) - whole).clamp(max=0.0)
    return masses


def _log_sum_exp(logits: Tensor) -> Tensor:
    """[n, vocab] -> [n]; on a CPU by a kernel whose rows do not depend on one another."""
    if logits.is_cpu and available():
        from radixrt_kernels.sampler import log_sum_exp

        return log_sum_exp(logits)
    return logits.logsumexp(-1)


def logprob_rows(
    token_ids: Tensor,
    logprobs: Tensor,
    slots: Sequence[int],
    num_top: Sequence[int],
    kept: Sequence[float | None] | None = None,
) -> list[SlotLogprobs]:
    """The result of :func:`raw_logprobs` as messages, each with as many tokens as its slot asked
    for.

    Args:
        kept: the logarithm of each row's kept mass; None: it is not asked for.
    """
    kept = [None] * len(slots) if kept is None else kept
    columns = zip(slots, num_top, token_ids.tolist(), logprobs.tolist(), kept, strict=True)
    return [
        SlotLogprobs(slot, pack_ids(ids[: 1 + top]), values[: 1 + top], mass)
        for slot, top, ids, values, mass in columns
    ]


def prompt_logprob_rows(
    token_ids: Tensor, logprobs: Tensor, slot: int, num_top: int
) -> list[SlotLogprobs]:
    """The result of :func:`raw_logprobs` for consecutive positions of one sequence's prompt, one
    message each."""
    count = len(token_ids)
    return logprob_rows(token_ids, logprobs, [slot] * count, [num_top] * count)


Draw = Callable[[SamplingBatch, Tensor, Tensor, TokenMask | None], tuple[Tensor, Tensor]]
"""Of a batch's settings, logits [rows, vocab] float32 (which may be overwritten), positions [rows]
int64 and mask: token ids [rows] int64, and each row's largest logit as the model gave it [rows]
float32, NaN or infinite where some logit is."""


def fastest_draw(device: torch.device) -> Draw:
    """The way to draw tokens on a device."""
    if device.type == "cuda":
        return draw_in_one_kernel
    return draw_by_native_kernel if available() else draw_by_torch


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row, still on the device. Rows behind drafts that were not drawn are not
    among them."""

    token_ids: Tensor  # [rows] int64
    asked: LogprobRows | None
    """Rows whose log-probabilities are asked for."""
    kept: NDArray[np.int64] | None
    """[rows] of the rows that were to be sampled; None: all."""
    peaks: Tensor  # [rows] float32, each row's largest logit as the model gave it
    logprobs: tuple[Tensor, Tensor] | None
    """Token ids and log-probabilities of the rows that ask for them, as ``raw_logprobs`` returns
    them."""
    log_kept_masses: Tensor | None = None
    """Of the rows ``asked``, if one of them asks for it."""

    def tensors(self) -> list[Tensor]:
        """The tensors that :meth:`read` needs on the host."""
        token_ids = self.token_ids.where(self.peaks.isfinite(), NO_TOKEN)
        masses = () if self.log_kept_masses is None else (self.log_kept_masses,)
        return [token_ids, *(self.logprobs or ()), *masses]

    def read(self, tensors: Sequence[Tensor]) -> tuple[TokenIds, list[SlotLogprobs]]:
        """Token ids [rows] and the log-probabilities asked for, in row order.

        A row whose logits hold NaN or are infinite has NO_TOKEN.
        """
        rows: list[SlotLogprobs] = []
        if (asked := self.asked) is not None:
            kept = None
            if self.log_kept_masses is not None:
                masses = zip(tensors[-1].tolist(), asked.kept_mass, strict=True)
                kept = [mass if wanted else None for mass, wanted in masses]
            ids, logprobs = tensors[1:3] if self.logprobs else (_no_columns(asked),) * 2
            rows = logprob_rows(ids, logprobs, asked.slots, asked.num_top, kept)
        return tensors[0].numpy().astype(np.int32), rows


def _no_columns(asked: LogprobRows) -> Tensor:
    return torch.empty(len(asked.slots), 0)


def sample(
    state: SamplingState,
    logits: Tensor,
    slots: Sequence[int] | NDArray[np.integer],
    positions: Tensor,
    mask: TokenMask | None = None,
    draw: Draw | None = None,
    drafted: NDArray[np.int64] | None = None,
) -> SampledTokens:
    """Draw the next token of each row, and count it where penalties need it.

    With drafts, only the rows are kept whose tokens are final
    (:mod:`radixrt.worker.drafts.verification`). The host reads the tokens for that, so it waits for
    the device.

    Args:
        logits: float32 [rows, vocab]; overwritten.
        slots: slot of each row, without repetition but for drafts.
        positions: int64 [rows], the position in its sequence that each sampled token will have.
        mask: tokens that constrained rows may sample.
        drafted: [rows] draft token behind each row, NO_DRAFT behind the last of a slot; None: no
            drafts.
    """
    batch = state.batch(slots)
    if drafted is not None:
        batch = state.with_drafts(batch, drafted)
    asked, kept, raw, masses = batch.logprobs, None, None, None
    if asked is not None:
        raw = logits[asked.rows] if max(asked.num_top) >= 0 else None
        if asked.kept_mass.any():
            masses = log_kept_masses(logits, asked, mask, state.device)
    draw = draw or draw_by_torch
    token_ids, peaks = draw(batch, logits, positions, mask)
    if drafted is not None:
        unfilled = NO_ROWS if mask is None else mask.unfilled
        kept = rows_to_keep(token_ids.numpy(), drafted, unfilled)
    state.record(batch, token_ids, kept)
    if kept is not None and asked is not None:
        chosen = np.flatnonzero(np.isin(asked.on_host, kept))
        raw, masses = (None if part is None else part[chosen] for part in (raw, masses))
        asked = asked.take(chosen.tolist())
    logprobs = None
    if raw is not None and asked is not None:
        logprobs = raw_logprobs(raw, token_ids[asked.rows], max(0, *asked.num_top))
    if kept is not None:
        token_ids, peaks = token_ids[kept], peaks[kept]
    return SampledTokens(token_ids, asked, kept, peaks, logprobs, masses)


def draw_by_native_kernel(
    batch: SamplingBatch, logits: Tensor, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor]:
    """On a CPU, without a sort; see ``Draw``."""
    from radixrt_kernels.sampler import draw_tokens

    _adjust(logits, batch, positions)
    masked = None
    if mask is not None:
        masked = (torch.from_numpy(mask.rows), torch.from_numpy(mask.bits))
    return draw_tokens(logits, batch.packed, positions, masked)


def draw_by_torch(
    batch: SamplingBatch, logits: Tensor, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor]:
    """On any device; see ``Draw``."""
    peaks = logits.amax(dim=-1)
    _adjust(logits, batch, positions)
    if mask is not None:
        _keep_allowed(logits, mask, batch.counts.device)
    token_ids = logits.argmax(dim=-1)
    for row, settings in enumerate(batch.packed.cpu().numpy().view(DRAW_SETTINGS)[:, 0]):
        if settings["temperature"] > 0:
            token_ids[row] = _draw(logits[row], settings, positions[row])
    return token_ids, peaks


def _adjust(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> None:
    """Apply penalties and biases in place."""
    if batch.penalised is not None:
        _penalise(logits, batch.penalised, batch.counts)
    if batch.biases is not None:
        batch.biases.add_to(logits, positions)


def _penalise(logits: Tensor, penalised: PenalisedRows, counts: TokenCounts) -> None:
    """Repetition penalty over prompt and answer, then frequency and presence over the answer."""
    rows = penalised.rows
    in_output = counts.in_output[penalised.counts_rows]  # [n, vocab], a copy
    if penalised.drafts is not None:
        one = torch.ones((), dtype=torch.int32, device=in_output.device)
        in_output.index_put_(penalised.drafts, one, accumulate=True)
    in_answer = in_output > 0
    values = logits[rows]
    repeated = torch.where(values > 0, values / penalised.repetition, values * penalised.repetition)
    values = torch.where(in_answer | counts.in_prompt[penalised.counts_rows], repeated, values)
    values -= penalised.frequency * in_output
    values -= penalised.presence * in_answer
    logits[rows] = values


def _keep_allowed(logits: Tensor, mask: TokenMask, device: Device) -> None:
    """Set the logits of all tokens that the mask does not allow to minus infinity."""
    vocab = logits.shape[-1]
    rows, words = device.upload(mask.rows, mask.bits)
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    forbidden = (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)[:, :vocab] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


def _draw(logits: Tensor, settings: np.void, position: Tensor) -> Tensor:
    """Draw one token from ``logits`` [vocab] under temperature, top-k, then top-p among the rest,
    then min-p.

    Each keeps the tokens whose value reaches a threshold, and so all that tie with the last one
    kept. The set therefore depends on the logits alone, and not on the order in which a sort left
    equal ones (bfloat16 has many).
    """
    temperature, top_k, top_p, log_min_p, seed_key = settings.tolist()
    values, token_ids = (logits / temperature).sort(descending=True)
    kth = values[min(top_k, len(values)) - 1]
    probabilities = values.softmax(dim=-1).masked_fill_(values < kth, 0.0)
    mass = probabilities.sum() if top_k < len(values) else 1.0
    before = probabilities.cumsum(dim=-1) - probabilities
    size = (before < top_p * mass).sum()
    nucleus = values[(size - 1).clamp(min=0)]
    threshold = torch.stack((kth, nucleus, values[0] + log_min_p)).max()
    noise = gumbel_noise(token_ids.new_tensor([seed_key]), position.view(1), token_ids)[0]
    return token_ids[(values + noise).masked_fill_(values < threshold, -math.inf).argmax()]


def draw_in_one_kernel(
    batch: SamplingBatch, logits: Tensor, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor]:
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
            batch.counts.in_prompt,
            batch.counts.in_output,
        )
    if batch.biases is not None:
        batch.biases.add_to(logits, positions)
    if mask is None:
        return draw_tokens(logits, batch.packed, positions)
    mask_rows, mask_bits = batch.counts.device.upload(*_with_a_free_row(mask, len(logits)))
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
