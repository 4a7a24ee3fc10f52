"""Replays steps without the model's Python: decode steps on a GPU from CUDA graphs, so that the
layers' hundreds of kernels are launched at once, and steps on a CPU from tapes of their kernel
calls.

A graph's shapes and addresses are fixed. So there is one for each rung of a ladder of batch sizes,
steps are padded to the next rung, and the inputs (tokens, positions, page tables) are copied into
place before a replay.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixrt.attention.backend import AttentionBackend, ForwardContext
from radixrt.attention.flashinfer import FlashInferBackend, lacks_kernels
from radixrt.attention.metadata import AttentionMetadata
from radixrt.base.errors import ConfigError
from radixrt.device.device import Device
from radixrt.layers.lora import StepRows
from radixrt.models.decoder import CausalLM
from radixrt.worker.batch import StepInputs
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.kv.ragged import RaggedStep
from radixrt_kernels.tape import Tape, Tapes
from radixrt_kernels.trace import NotRecordable

LARGEST = 1024
"""Largest batch size that is captured by default."""


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: powers of two up to 16, then every 8th up to 128, every 16th up to
    256, every 32nd up to 512 and every 64th; ``largest`` is the last.

    Padding adds an eighth or less to steps of more than 64 rows; each row of it reads one token.
    """
    rungs = [1, 2, 4, 8, *range(16, 128, 8), *range(128, 256, 16), *range(256, 512, 32)]
    rungs += range(512, largest + 1, 64)
    return [*(rung for rung in rungs if rung < largest), largest] if largest else []


@dataclass(frozen=True, slots=True)
class _Graph:
    attention: AttentionBackend
    replay: Callable[[], None]
    hidden: torch.Tensor  # [rung, hidden_size], result of the last replay


class DecodeGraphs:
    """One graph a rung, from token ids to hidden states; logits and sampling depend on the rows and
    stay outside."""

    def __init__(
        self,
        model: CausalLM,
        backend: FlashInferBackend,
        pool: KVPool,
        rungs: list[int],
        device: Device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._pool = pool
        self._rungs = rungs
        self._device = device
        zeros = np.zeros(max(rungs), dtype=np.int64)
        self._token_ids, self._positions = device.upload(zeros, zeros)
        self._graphs: dict[tuple[int, str], _Graph] = {}

    def rows_for(self, rows: int) -> int | None:
        """The rung for a decode step of ``rows`` rows; None: there is none, or nothing to
        compute."""
        if rows == 0:
            return None
        return next((rung for rung in self._rungs if rung >= rows), None)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all rungs, the largest first: the others find room in the memory that it took."""
        for rung in sorted(self._rungs, reverse=True):
            for kind in self._backend.graph_kinds(rung):
                self._graphs[rung, kind] = self._capture(rung, self._backend.for_graph(rung, kind))

    def _capture(self, rung: int, attention: AttentionBackend) -> _Graph:
        attention.plan(self._nobody(rung))
        context = ForwardContext(attention, self._pool.kv_caches)
        token_ids, positions = self._token_ids[:rung], self._positions[:rung]
        try:
            replay, hidden = self._device.capture(
                lambda: self._model.forward(token_ids, positions, context)
            )
        except RuntimeError as error:
            raise lacks_kernels(error) or ConfigError(
                f"A decode step of {rung} sequences could not be captured as a CUDA graph: start with --debug-disable-cuda-graph, "
                f"or with a smaller --cuda-graph-max-batch-size. ({error})"
            ) from error
        return _Graph(attention, replay, hidden)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [rung, hidden_size] of a step that is padded to a rung. The next run
        overwrites them."""
        assert inputs.graph_rows is not None
        kind = self._backend.graph_kind(inputs.attention)
        graph = self._graphs[inputs.graph_rows, kind]
        graph.attention.plan(inputs.attention)
        self._token_ids[: inputs.graph_rows].copy_(inputs.token_ids)
        self._positions[: inputs.graph_rows].copy_(inputs.positions)
        graph.replay()
        return graph.hidden

    def _nobody(self, rows: int) -> AttentionMetadata:
        """A step of padding alone."""
        nothing = np.empty(0, dtype=np.int64)
        no_tables = np.empty((0, 1), dtype=np.int32)
        step = RaggedStep.for_slots(no_tables, self._pool.page_size, nothing, nothing, nothing)
        step = step.padded(rows, self._pool.spare_page)
        kv_indices, kv_locations = self._device.upload(step.kv_indices, step.kv_locations)
        return step.metadata(kv_indices, kv_locations, self._device)


log = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Tokens of a step whose rows are all wanted. In larger ones the kernels take longer than the
Python between them."""

MAX_TOKENS_WITH_PROMPTS = 1024
"""Tokens of a step whose tape ends at the last attention. Its tensors stay in the caches, where
tensors that are allocated anew for each layer do not."""

MAX_KEPT = 128
"""Tapes; another one is made in a millisecond or two."""


class StepTapes:
    """A tape for each number of tokens, from token ids to hidden states. Of steps with prompts, few
    rows are wanted: what is behind the last attention is computed without a tape.

    Steps with rows of LoRA adapters have tapes of their own, so that the others stay as they are.

    The backend of ``context`` must call its kernels by ``radixrt_kernels.trace``.
    """

    def __init__(
        self,
        model: CausalLM,
        context: ForwardContext,
        expert_counts: torch.Tensor | None = None,
        adapter_rows: StepRows | None = None,
    ) -> None:
        """
        Args:
            expert_counts: of ``count_tokens``; None: the model does not count.
            adapter_rows: None: there are no adapters.
        """
        self._model = model
        self._context = context
        self._expert_counts = expert_counts
        self._rows = adapter_rows
        self._tapes = _tapes_of(model, context, expert_counts)
        """The tapes, by whether they end with the last attention. None: this model has none."""
        self._tape_of = functools.lru_cache(MAX_KEPT)(self._make)
        self._with_adapters: Tapes | None = None
        self._adapter_memory = torch.empty(0, dtype=torch.uint8)
        """The memory of all tapes with adapters."""
        self._adapter_tape_of = functools.lru_cache(MAX_KEPT)(self._make_with_adapters)

    def forget_adapters(self) -> None:
        """Layers have other stacks of adapters: drop the tapes without these."""
        self._with_adapters = None
        self._adapter_tape_of.cache_clear()

    def forward_with_adapters(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        adapters: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`forward`.

        Args:
            adapters: [num_tokens] int64, the place of each row's adapter.
        """
        if len(token_ids) > MAX_TOKENS or self._tapes is None:
            return with_adapters(
                self._model, self._context, self._rows, token_ids, positions, adapters, rows
            )
        whole: torch.Tensor = self._adapter_tape_of(len(token_ids)).replay(
            token_ids, positions, adapters
        )
        return whole if rows is None else whole[rows]

    def _make_with_adapters(self, count: int) -> Tape:
        if self._with_adapters is None:

            def compute(
                token_ids: torch.Tensor, positions: torch.Tensor, adapters: torch.Tensor
            ) -> torch.Tensor:
                return with_adapters(
                    self._model, self._context, self._rows, token_ids, positions, adapters
                )

            self._with_adapters = _tapes_of_part(
                compute, self._context, self._expert_counts, num_inputs=3
            )
            num_bytes = self._with_adapters.num_bytes(MAX_TOKENS)
            self._adapter_memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._with_adapters.of(count, self._adapter_memory)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the model's ``forward``, [num_tokens or len(rows), hidden_size]; the next
        step may overwrite it."""
        count = len(token_ids)
        fewer = count > MAX_TOKENS if rows is None else len(rows) < count
        by_rows = fewer and self._model.ends_by_rows
        is_small = count <= (MAX_TOKENS_WITH_PROMPTS if by_rows else MAX_TOKENS)
        tape = self._tape_of(count, by_rows) if is_small else None
        if tape is None:
            return self._model.forward(token_ids, positions, self._context, rows)
        if by_rows:
            hidden, residual = tape.replay(token_ids, positions)
            if rows is not None:
                hidden, residual = hidden[rows], residual[rows]
            return self._model.after_last_attention(hidden, residual)
        whole: torch.Tensor = tape.replay(token_ids, positions)
        return whole if rows is None else whole[rows]

    def _make(self, count: int, by_rows: bool) -> Tape | None:
        """The tape of a whole step, or of its part up to the last attention."""
        if self._tapes is None:
            return None
        return self._tapes[by_rows].of(count, self._memory)

    @functools.cached_property
    def _memory(self) -> torch.Tensor:
        """The memory of all tapes; its pages become resident where a tape uses them."""
        assert self._tapes is not None
        most = {False: MAX_TOKENS, True: MAX_TOKENS_WITH_PROMPTS}
        num_bytes = max(tapes.num_bytes(most[by_rows]) for by_rows, tapes in self._tapes.items())
        return torch.empty(num_bytes, dtype=torch.uint8)


def with_adapters(
    model: CausalLM,
    context: ForwardContext,
    lora: StepRows | None,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    adapters: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's ``forward``, each row with its adapter."""
    assert lora is not None, "adapters were admitted to a model without"
    with lora.use(adapters):
        if rows is None or not model.ends_by_rows:
            return model.forward(token_ids, positions, context, rows)
        hidden, residual = model.up_to_last_attention(token_ids, positions, context)
        lora.sort(adapters[rows])
        return model.after_last_attention(hidden[rows], residual[rows])


def _tapes_of(
    model: CausalLM, context: ForwardContext, counts: torch.Tensor | None
) -> dict[bool, Tapes] | None:
    parts: dict[bool, Callable[..., Any]] = {False: lambda i, p: model.forward(i, p, context)}
    if model.ends_by_rows:
        parts[True] = lambda i, p: model.up_to_last_attention(i, p, context)
    try:
        return {by_rows: _tapes_of_part(part, context, counts) for by_rows, part in parts.items()}
    except NotRecordable as reason:
        log.info("Steps of this model are not taped: %s.", reason)
        return None


@contextmanager
def _unchanged(counts: torch.Tensor | None) -> Iterator[None]:
    before = None if counts is None else counts.clone()
    yield
    if counts is not None and before is not None:
        counts.copy_(before)


def _tapes_of_part(
    part: Callable[..., Any],
    context: ForwardContext,
    counts: torch.Tensor | None,
    num_inputs: int = 2,
) -> Tapes:
    """The tapes of a function of token ids, positions, and perhaps adapters."""

    def check(*inputs: torch.Tensor) -> Any:
        states = nullcontext() if context.states is None else context.states.unchanged()
        with states, _unchanged(counts):
            return part(*inputs)

    zeros = torch.zeros(1, dtype=torch.int64)
    return Tapes(part, *[zeros] * num_inputs, check=check)
