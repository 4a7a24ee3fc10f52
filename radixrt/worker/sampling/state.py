"""Keeps the sampling settings of every slot of the running batch.

:class:`SamplingState` keeps the settings in numpy columns on the host, and token counts on the
device for the slots with penalties. :meth:`SamplingState.batch` turns the slots of a step into a
:class:`SamplingBatch`: index and parameter tensors of the rows that have a setting. It is built
when the batch changes and reused while it does not, so a decode step of the same sequences costs no
Python per sequence.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import CPU, Device
from radixrt.messages.ids import TokenIds
from radixrt.worker.drafts.verification import tokens_before
from radixrt.worker.sampling.noise import seed_keys

MIN_TEMPERATURE = 1e-5
"""Smallest temperature of a sampled request: float32 logits divided by less lose their
differences."""

FORBIDDEN = -1e30
"""Bias of a token that must not be sampled. Finite, so that a request which forbids its whole
vocabulary still has a distribution and does not fail the batch."""

NO_LIMIT = 2.0
"""top_p of a slot without one: above any cumulative probability, however it was rounded."""

DRAW_SETTINGS = np.dtype(
    [
        ("temperature", "f4"),  # 0: greedy
        ("top_k", "i4"),  # vocab_size where there is no limit
        ("top_p", "f4"),
        ("log_min_p", "f4"),
        ("seed_key", "i8"),  # of radixrt.worker.sampling.noise
    ]
)
"""The settings of a draw, in the layout that ``radixrt_kernels.triton.sampling`` and
``radixrt_kernels.sampler`` read."""

_SETTINGS = np.dtype(
    [
        ("counts_row", "i8"),  # in TokenCounts; -1: no penalties
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("num_top_logprobs", "i8"),  # -1: no logprobs at all
        ("kept_mass", "?"),
    ]
)


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows of the batch whose logits depend on the tokens already there."""

    rows: Tensor  # [n] int64, into the batch
    counts_rows: Tensor  # [n] int64, into TokenCounts
    repetition: Tensor  # [n, 1] float32
    presence: Tensor  # [n, 1] float32
    frequency: Tensor  # [n, 1] float32
    drafts: tuple[Tensor, Tensor] | None = None
    """Draft tokens that count as well, both [m] int64: indices into ``rows``, and tokens."""


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """Numbers to add to single logits: logit_bias, and the tokens that min_tokens forbids."""

    rows: Tensor  # [n] int64, into the batch
    token_ids: Tensor  # [n] int64
    values: Tensor  # [n] float32
    until: Tensor  # [n] int64; the bias holds for positions below this

    def add_to(self, logits: Tensor, positions: Tensor) -> None:
        """Add the biases to float32 logits [rows, vocab], in place; ``positions`` are the rows',
        int64 [rows]."""
        active = positions[self.rows] < self.until
        values = torch.where(active, self.values, 0.0)
        logits.index_put_((self.rows, self.token_ids), values, accumulate=True)


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows of the batch that ask for log-probabilities, or for the mass that the mask keeps."""

    rows: Tensor  # [n] int64, into the batch
    on_host: NDArray[np.int64]  # the same
    slots: list[int]
    num_top: list[int]
    """Alternatives; -1: no log-probabilities."""
    kept_mass: NDArray[np.bool_]  # [n]

    def take(self, chosen: list[int]) -> "LogprobRows":
        """Some of them."""
        return LogprobRows(
            self.rows[chosen],
            self.on_host[chosen],
            [self.slots[i] for i in chosen],
            [self.num_top[i] for i in chosen],
            self.kept_mass[chosen],
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The slots of a step and their settings; None: no row has such a setting."""

    slots: NDArray[np.int64]
    counts: "TokenCounts"
    packed: Tensor  # [rows, 6] int32, the words of DRAW_SETTINGS
    penalised: PenalisedRows | None
    biases: TokenBiases | None
    logprobs: LogprobRows | None


class TokenCounts:
    """Counts of each token in prompt and answer, for the slots with penalties. Grows by doubling.

    A row takes 5 bytes per token of the vocabulary, which is why slots without penalties have none.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        self.device = device
        place = device.torch_device
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=place)
        self.in_output = torch.zeros((0, vocab_size), dtype=torch.int32, device=place)
        self._free: list[int] = []

    def admit(self, prompt: TokenIds, output: TokenIds) -> int:
        """Count a sequence's tokens; returns its row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompt_ids, output_ids = self.device.upload(
            prompt.astype(np.int64), output.astype(np.int64)
        )
        self.in_prompt[row].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.in_output[row].zero_().index_add_(0, output_ids, ones)
        return row

    def release(self, row: int) -> None:
        self._free.append(row)

    def _grow(self) -> None:
        old = len(self.in_prompt)
        new = max(2 * old, 4)
        self._free.extend(range(old, new))
        self.in_prompt = F.pad(self.in_prompt, (0, 0, 0, new - old))
        self.in_output = F.pad(self.in_output, (0, 0, 0, new - old))


class SamplingState:
    """Sampling settings of all slots; owned by the worker."""

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        device: Device = CPU,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = TokenCounts(vocab_size, device)
        self._eos_token_ids = tuple(eos_token_ids)
        self._draws = np.zeros(max_slots, dtype=DRAW_SETTINGS)
        self._settings = np.zeros(max_slots, dtype=_SETTINGS)
        self._settings["counts_row"] = -1
        self._biases: dict[int, list[tuple[int, float, int]]] = {}
        """Slot → (token id, value, position below which it holds)."""
        self._batch: SamplingBatch | None = None

    def admit(
        self, slot: int, sampling: SamplingParams, token_ids: TokenIds, num_output: int
    ) -> None:
        """Take a sequence into a free slot.

        Args:
            slot: in 0..max_slots - 1.
            sampling: validated, and with a seed unless it is greedy.
            token_ids: prompt, followed by the tokens generated before a retraction.
            num_output: how many of ``token_ids`` were generated.
        """
        if sampling.seed is None and not sampling.is_greedy:
            raise ValueError("a sequence that is sampled at random needs a seed")
        num_prompt = len(token_ids) - num_output
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
        self._draws[slot] = (
            0.0 if sampling.is_greedy else max(sampling.temperature, MIN_TEMPERATURE),
            top_k,
            sampling.top_p if sampling.top_p < 1 else NO_LIMIT,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            seed_keys(torch.tensor(sampling.seed or 0)).item(),
        )
        settings = self._settings[slot]
        settings["repetition"] = sampling.repetition_penalty
        settings["presence"] = sampling.presence_penalty
        settings["frequency"] = sampling.frequency_penalty
        settings["num_top_logprobs"] = -1 if sampling.logprobs is None else sampling.logprobs
        settings["kept_mass"] = sampling.kept_mass
        if _has_penalties(sampling):
            row = self.counts.admit(token_ids[:num_prompt], token_ids[num_prompt:])
            settings["counts_row"] = row
        biases = self._biases_of(sampling, num_prompt)
        if biases:
            self._biases[slot] = biases

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot."""
        settings = self._settings[slot]
        if settings["counts_row"] >= 0:
            self.counts.release(int(settings["counts_row"]))
            settings["counts_row"] = -1
        self._biases.pop(slot, None)
        self._batch = None

    def batch(self, slots: Sequence[int] | NDArray[np.integer]) -> SamplingBatch:
        """The settings of these slots, in this order.

        Returns the last batch again if it has the same slots and none was released since: the
        settings of a slot change only after a release.
        """
        slot_array = np.asarray(slots, dtype=np.int64)
        if self._batch is None or not np.array_equal(self._batch.slots, slot_array):
            self._batch = self._look_up(slot_array.copy())
        return self._batch

    def record(
        self, batch: SamplingBatch, token_ids: Tensor, kept: NDArray[np.int64] | None = None
    ) -> None:
        """Count the sampled tokens, int64 [rows], in the rows with penalties.

        Args:
            kept: rows whose tokens are final; None: all are.
        """
        if batch.penalised is None:
            return
        place = (batch.penalised.counts_rows, token_ids[batch.penalised.rows])
        if kept is not None:
            final = torch.from_numpy(np.isin(batch.penalised.rows.numpy(), kept))
            place = (place[0][final], place[1][final])
        one = torch.ones((), dtype=torch.int32, device=self.device.torch_device)
        self.counts.in_output.index_put_(place, one, accumulate=True)

    def with_drafts(self, batch: SamplingBatch, drafted: NDArray[np.int64]) -> SamplingBatch:
        """The batch, whose penalties count the drafts before each row; ``drafted`` [rows] is the
        draft behind each."""
        if batch.penalised is None:
            return batch
        before = tokens_before(batch.penalised.rows.numpy(), drafted)
        rows, tokens = self.device.upload(*before)
        penalised = dataclasses.replace(batch.penalised, drafts=(rows, tokens))
        return dataclasses.replace(batch, penalised=penalised)

    def count(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count tokens of a slot that were forced, not sampled, if it has penalties."""
        row = int(self._settings[slot]["counts_row"])
        if row >= 0:
            for token in token_ids:
                self.counts.in_output[row, token] += 1

    def _biases_of(self, sampling: SamplingParams, num_prompt: int) -> list[tuple[int, float, int]]:
        forever = np.iinfo(np.int64).max
        biases = [
            (token, value, int(forever)) for token, value in (sampling.logit_bias or {}).items()
        ]
        if sampling.min_tokens > 0:
            # Under ignore_eos the end tokens end nothing, so there is no reason to forbid them.
            eos = () if sampling.ignore_eos else self._eos_token_ids
            until = num_prompt + sampling.min_tokens
            biases += [(token, FORBIDDEN, until) for token in {*eos, *sampling.stop_token_ids}]
        return biases

    def _look_up(self, slots: NDArray[np.int64]) -> SamplingBatch:
        settings = self._settings[slots]
        return SamplingBatch(
            slots=slots,
            counts=self.counts,
            packed=self._tensor(self._draws[slots].view(np.int32).reshape(len(slots), -1)),
            penalised=self._penalised_rows(settings),
            biases=self._token_biases(slots),
            logprobs=self._logprob_rows(slots, settings),
        )

    def _penalised_rows(self, settings: NDArray) -> PenalisedRows | None:
        rows = np.flatnonzero(settings["counts_row"] >= 0)
        if not len(rows):
            return None
        chosen = settings[rows]
        names = ("repetition", "presence", "frequency")
        repetition, presence, frequency = (
            self._tensor(chosen[name]).unsqueeze(-1) for name in names
        )
        counts_rows = self._tensor(chosen["counts_row"])
        return PenalisedRows(self._tensor(rows), counts_rows, repetition, presence, frequency)

    def _token_biases(self, slots: NDArray[np.int64]) -> TokenBiases | None:
        if not self._biases:
            return None
        entries = [
            (row, *bias)
            for row, slot in enumerate(slots.tolist())
            for bias in self._biases.get(slot, ())
        ]
        if not entries:
            return None
        dtypes = (np.int64, np.int64, np.float32, np.int64)
        columns = zip(zip(*entries, strict=True), dtypes, strict=True)
        return TokenBiases(*(self._tensor(np.array(of, dtype=dtype)) for of, dtype in columns))

    def _logprob_rows(self, slots: NDArray[np.int64], settings: NDArray) -> LogprobRows | None:
        rows = np.flatnonzero((settings["num_top_logprobs"] >= 0) | settings["kept_mass"])
        if not len(rows):
            return None
        num_top, kept_mass = settings["num_top_logprobs"][rows], settings["kept_mass"][rows]
        slot_ids = slots[rows].tolist()
        return LogprobRows(self._tensor(rows), rows, slot_ids, num_top.tolist(), kept_mass)

    def _tensor(self, column: NDArray) -> Tensor:
        return self.device.upload(column.copy())[0]


def _has_penalties(sampling: SamplingParams) -> bool:
    additive = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1 or any(additive)
