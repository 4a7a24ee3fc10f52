"""Which token comes next? From a step's logits to one token a sequence.

The order is the field's: penalties, then biases, then the grammars' mask, then temperature, then top-k,
top-p and min-p, then one draw by the Gumbel-max trick with the noise of :mod:`radixrt.worker.noise`. Rows without a setting do
not pay for it, and a batch that is all greedy costs one argmax.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.device import Device
from radixrt.messages.ids import TokenIds
from radixrt.messages.sequences import LogprobRow
from radixrt.messages.steps import NO_TOKEN
from radixrt.worker.cpu_sampler import draw_by_native_kernel
from radixrt.worker.gpu_sampler import draw_in_one_kernel
from radixrt.worker.grammars import TokenMask
from radixrt.worker.logprobs import logprob_rows, raw_logprobs
from radixrt.worker.noise import gumbel_noise
from radixrt.worker.sampling_state import (
    DrawSettings,
    PenalisedRows,
    SamplingBatch,
    SamplingState,
)

CPU_CANDIDATES = (128, 2048)
"""How many of the largest logits to look at for top-k and top-p before sorting a whole row.

On one CPU core, 32k vocabulary: 56 and 275 µs, against 1,750 µs for the sort."""

CHUNK_ELEMENTS = 1 << 18
"""Logits that go together on a CPU where several passes are made over them: what stays in the cache."""

SPARSE_SHARE = 16
"""A row of which less than a sixteenth is allowed is written from what is allowed: reading a hundred logits
beats passing over all of them."""

ARGMAX_BLOCK = 256
ARGMAX_BLOCKS_ABOVE = 1 << 17
"""Numbers from which on its eight small operations cost less than one slow one."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row, still on the device."""

    token_ids: Tensor  # [rows] int64
    batch: SamplingBatch
    peaks: Tensor  # [rows] float32, each row's largest logit as the model gave it
    logprobs: tuple[Tensor, Tensor] | None
    """Token ids and log-probabilities of the rows that asked, as raw_logprobs gives them."""

    def tensors(self) -> list[Tensor]:
        """What :meth:`read` needs on the host."""
        token_ids = self.token_ids.where(self.peaks.isfinite(), NO_TOKEN)
        return [token_ids, *(self.logprobs or ())]

    def read(self, tensors: Sequence[Tensor]) -> tuple[TokenIds, list[LogprobRow]]:
        """Token ids [rows] and the log-probabilities asked for, in row order.

        A row whose logits hold NaN or are infinite has NO_TOKEN.

        Args:
            tensors: those of :meth:`tensors`, on the host.
        """
        rows: list[LogprobRow] = []
        if self.logprobs is not None and self.batch.logprobs is not None:
            asked = self.batch.logprobs
            rows = logprob_rows(tensors[1], tensors[2], asked.slots, asked.num_top)
        return tensors[0].numpy().astype(np.int32), rows


def sample(
    state: SamplingState,
    logits: Tensor,
    slots: Sequence[int] | NDArray[np.integer],
    positions: Tensor,
    mask: TokenMask | None = None,
) -> SampledTokens:
    """Choose the next token of each row and count it where penalties will ask.

    Args:
        state: settings of the slots.
        logits: float32 [rows, vocab]; overwritten.
        slots: slot of each row, without repetition.
        positions: int64 [rows], the position in its sequence that each sampled token will have.
        mask: what constrained rows may sample.
    """
    batch = state.batch(slots)
    raw = None if batch.logprobs is None else logits[batch.logprobs.rows]
    if batch.packed is not None and not state.draws_natively:
        token_ids, peaks = draw_in_one_kernel(
            batch, state.counts, logits, positions, mask, state.device
        )
    else:
        token_ids, peaks = _draw_in_groups(batch, state, logits, positions, mask)
    state.record(batch, token_ids)
    logprobs = None
    if raw is not None and batch.logprobs is not None:
        logprobs = raw_logprobs(raw, token_ids[batch.logprobs.rows], max(batch.logprobs.num_top))
    return SampledTokens(token_ids, batch, peaks, logprobs)


def _draw_in_groups(
    batch: SamplingBatch,
    state: SamplingState,
    logits: Tensor,
    positions: Tensor,
    mask: TokenMask | None,
) -> tuple[Tensor, Tensor]:
    """Token ids and the largest logit of each row, both [rows]."""
    peaks = logits.amax(dim=-1) if batch.packed is None else logits.new_empty(0)
    if batch.penalised is not None:
        _penalise(logits, batch.penalised, state)
    if batch.biases is not None:
        batch.biases.add_to(logits, positions)
    if batch.packed is not None:
        return draw_by_native_kernel(batch, logits, positions, mask)
    if mask is not None:
        _keep_allowed(logits, mask, state.device)
    # Sampled rows are overwritten below; where there are no others, the argmax is not worth its pass.
    token_ids = _argmax(logits) if batch.any_greedy else positions.new_empty(len(logits))
    # Asking whether some candidates were enough would wait for the device; it sorts whole rows at once.
    widths = () if state.device.overlaps else CPU_CANDIDATES
    truncated = partial(_draw_truncated, widths=widths)
    for group, draw in ((batch.truncated, truncated), (batch.untruncated, _draw_untruncated)):
        if group is not None:
            scaled = logits[group.rows].div_(group.settings.temperature)
            token_ids[group.rows] = draw(scaled, group.settings, positions[group.rows])
    return token_ids, peaks


def _penalise(logits: Tensor, penalised: PenalisedRows, state: SamplingState) -> None:
    """Repetition penalty over prompt and answer, then frequency and presence over the answer."""
    for chunk in _chunks(len(penalised.rows), logits):
        rows, counts = penalised.rows[chunk], penalised.counts_rows[chunk]
        in_output = state.counts.in_output[counts]  # [n, vocab]
        in_answer = in_output > 0
        repetition = penalised.repetition[chunk]
        values = logits[rows]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(in_answer | state.counts.in_prompt[counts], repeated, values)
        values -= penalised.frequency[chunk] * in_output
        values -= penalised.presence[chunk] * in_answer
        logits[rows] = values


def _argmax(values: Tensor) -> Tensor:
    """Index of the largest of each row of ``values`` [rows, vocab]; int64 [rows].

    On a CPU torch vectorises ``amax`` and not ``argmax``: looking for the best block first, and then inside
    it, takes a seventh of the time at 64 rows of 32k.
    """
    rows, vocab = values.shape
    too_small = vocab < 4 * ARGMAX_BLOCK or values.numel() < ARGMAX_BLOCKS_ABOVE
    if values.device.type != "cpu" or too_small:
        return values.argmax(dim=-1)
    end = vocab - vocab % ARGMAX_BLOCK
    peaks = values[:, :end].unflatten(-1, (-1, ARGMAX_BLOCK)).amax(dim=-1)  # [rows, blocks]
    best = peaks.argmax(dim=-1, keepdim=True)
    candidates = best * ARGMAX_BLOCK + torch.arange(ARGMAX_BLOCK)  # [rows, ARGMAX_BLOCK]
    if end < vocab:
        candidates = torch.cat((candidates, torch.arange(end, vocab).expand(rows, -1)), dim=-1)
    choice = values.gather(-1, candidates).argmax(dim=-1, keepdim=True)
    return candidates.gather(-1, choice).squeeze(-1)


def _chunks(count: int, logits: Tensor) -> Iterator[slice]:
    """Slices that cover ``count`` rows; on a GPU one slice, on a CPU as many as the cache wants."""
    step = count
    if logits.device.type == "cpu":
        step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, count, step))


def _draw_untruncated(scaled: Tensor, settings: DrawSettings, positions: Tensor) -> Tensor:
    """One token for each row of ``scaled`` [n, vocab] out of all that min-p leaves; int64 [n]."""
    every_token = torch.arange(scaled.shape[-1], dtype=torch.int32, device=scaled.device)
    threshold = scaled.amax(dim=-1, keepdim=True) + settings.log_min_p
    scaled.masked_fill_(scaled < threshold, -math.inf)
    for chunk in _chunks(len(scaled), scaled):
        scaled[chunk] += gumbel_noise(settings.seed_keys[chunk], positions[chunk], every_token)
    return _argmax(scaled)


def _draw_truncated(
    scaled: Tensor,
    settings: DrawSettings,
    positions: Tensor,
    widths: tuple[int, ...],
) -> Tensor:
    """One token for each row of ``scaled`` [n, vocab] out of its top-k, top-p and min-p; int64 [n].

    Looks only at each row's ``widths[0]`` largest logits, and again at more of them for rows where those
    were too few; at all of them, sorted, where there are no widths left.
    """
    vocab = scaled.shape[-1]
    width = min(widths[0], vocab) if widths else vocab
    values, token_ids = _largest(scaled, width)
    threshold = _threshold(values, scaled.logsumexp(dim=-1, keepdim=True), settings, vocab)
    noisy = values + gumbel_noise(settings.seed_keys, positions, token_ids)
    choice = noisy.masked_fill_(values < threshold, -math.inf).argmax(dim=-1, keepdim=True)
    tokens = token_ids.gather(-1, choice).squeeze(-1)
    if width < vocab:
        # Where even the smallest candidate was kept, a token that is none may have to be kept too.
        smallest = values[:, -1:]
        unsure = (smallest >= threshold) & (smallest > -math.inf)  # what is masked is no candidate
        unsure = unsure.squeeze(-1).nonzero().squeeze(-1)
        if len(unsure):
            tokens[unsure] = _draw_truncated(
                scaled[unsure], settings.take(unsure), positions[unsure], widths[1:]
            )
    return tokens


def _keep_allowed(logits: Tensor, mask: TokenMask, device: Device) -> None:
    """Set the logits of all tokens that the mask does not allow to minus infinity."""
    vocab = logits.shape[-1]
    if device.overlaps:  # an eighth of the bytes travels if the device takes the bits apart
        rows, words = device.upload(mask.rows, mask.bits)
        places = torch.arange(32, dtype=torch.int32, device=words.device)
        forbidden = (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)[:, :vocab] == 0
        logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)
        return
    bits = np.unpackbits(mask.bits.view(np.uint8), axis=-1, bitorder="little")
    allowed = bits[:, :vocab].view(np.bool_)  # [n, vocab]
    for row, keep in zip(mask.rows.tolist(), allowed, strict=True):
        if np.count_nonzero(keep) * SPARSE_SHARE > vocab:
            logits[row].masked_fill_(torch.from_numpy(~keep), -math.inf)
            continue
        token_ids = torch.from_numpy(np.flatnonzero(keep))
        kept = logits[row, token_ids]
        logits[row].fill_(-math.inf)[token_ids] = kept


def _largest(scaled: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Values and token ids, [n, width], of each row's largest logits in descending order."""
    if width == scaled.shape[-1]:
        return torch.sort(scaled, dim=-1, descending=True)
    return torch.topk(scaled, width, dim=-1)


def _threshold(values: Tensor, total: Tensor, settings: DrawSettings, vocab: int) -> Tensor:
    """The smallest logit that top-k, then top-p among what is left, then min-p keep; float32 [n, 1].

    A threshold on the value keeps all tokens that tie with the last one kept, so what may be sampled
    depends on the logits alone and not on how a sort arranged equal ones (bfloat16 makes many).

    Args:
        values: [n, width], each row's largest logits in descending order.
        total: [n, 1], log of the sum of all exponentiated logits of the row.
        settings: of the rows.
        vocab: size of the vocabulary.
    """
    last = values.shape[-1] - 1
    kth = values.gather(-1, (settings.top_k - 1).clamp(max=last))
    probabilities = (values - total).exp_().masked_fill_(values < kth, 0.0)
    kept = probabilities.sum(dim=-1, keepdim=True)
    # Without top-k all tokens are left, of which the candidates are only a part.
    mass = torch.where(settings.top_k < vocab, kept, 1.0)
    before = probabilities.cumsum(dim=-1) - probabilities
    size = (before < settings.top_p * mass).sum(dim=-1, keepdim=True)
    nucleus = values.gather(-1, (size - 1).clamp(min=0))
    return torch.maximum(torch.maximum(kth, nucleus), values[:, :1] + settings.log_min_p)
