"""Computes the shortest possible time of a workload, from measured ceilings.

A step reads every matrix once and every running sequence's KV once, and multiplies each of its
tokens by the layers' matrices; it can't take less than the longer of the two (Williams et al.,
2009). Counted are matrices, attention and KV; norms, activations and sampling are not, nor any
launch or wait. So the bound is one that nothing reaches, and the same for every engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.ceilings import Ceilings
from bench.gpu.shapes import ModelShape


@dataclass(frozen=True)
class Length:
    """Lengths of one request, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Scheduling:
    """What an ideal scheduler does: requests in order, each admitted as soon as there is room."""

    max_running: int
    prefill_tokens: int = 8192
    """Most prompt tokens of a step."""


@dataclass(frozen=True)
class Bound:
    """The least that a workload takes."""

    seconds: float
    steps: int
    gigabytes: float
    teraflops: float


def step_seconds(
    shape: ModelShape,
    ceilings: Ceilings,
    *,
    tokens: float,
    rows: float,
    context: float,
    attended: float,
) -> tuple[float, float, float]:
    """The bound of one step, its bytes and its FLOPs.

    Args:
        tokens: computed in the step, prompts and answers.
        rows: that sample a token.
        context: tokens of KV that are read.
        attended: pairs of a query and a token that it sees.
    """
    weights = (shape.layer_parameters + shape.head_parameters) * shape.element_bytes
    num_bytes = weights + (context + tokens) * shape.kv_bytes_per_token
    flops = (
        2 * shape.layer_parameters * tokens
        + 2 * shape.head_parameters * rows
        + shape.attention_flops * attended
    )
    seconds = max(num_bytes / ceilings.read_bytes_per_s, flops / ceilings.gemm_flops_per_s)
    return seconds, num_bytes, flops


def workload_bound(
    shape: ModelShape, ceilings: Ceilings, lengths: Sequence[Length], scheduling: Scheduling
) -> Bound:
    """Run the workload on paper: prompts are computed as early as room allows, decodes go along in
    the same steps."""
    run = _OnPaper(lengths, scheduling)
    seconds = num_bytes = flops = 0.0
    steps = 0
    while run.busy:
        work = run.step()
        step_s, step_bytes, step_flops = step_seconds(shape, ceilings, **work)
        seconds, num_bytes, flops = seconds + step_s, num_bytes + step_bytes, flops + step_flops
        steps += 1
    return Bound(seconds, steps, num_bytes / 1e9, flops / 1e12)


class _OnPaper:
    """An ideal batch: what its sequences hold, and what they still have to generate."""

    def __init__(self, lengths: Sequence[Length], scheduling: Scheduling) -> None:
        self._waiting = list(reversed(lengths))
        self._scheduling = scheduling
        self._context = np.empty(0)
        self._left = np.empty(0)
        self._begun: Length | None = None
        self._computed = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._begun is not None or len(self._left) > 0

    def step(self) -> dict[str, float]:
        """One step's work, as :func:`step_seconds` takes it."""
        decoding = len(self._left)
        context = float(self._context.sum())
        self._context, self._left = self._context + 1, self._left - 1
        prompt_tokens, prompt_attended, finished = self._prefill(decoding)
        alive = self._left > 0
        self._context, self._left = self._context[alive], self._left[alive]
        return {
            "tokens": decoding + prompt_tokens,
            "rows": decoding + finished,
            "context": context,
            "attended": context + prompt_attended,
        }

    def _prefill(self, decoding: int) -> tuple[float, float, int]:
        """Prompt tokens of the step, pairs they attend to, and number of completed prompts."""
        budget, tokens, attended, finished = self._scheduling.prefill_tokens, 0.0, 0.0, 0
        while budget and (self._begun or self._waiting):
            if self._begun is None:
                if decoding + finished >= self._scheduling.max_running:
                    break
                self._begun, self._computed = self._waiting.pop(), 0
            part = min(budget, self._begun.prompt - self._computed)
            tokens += part
            attended += part * (self._computed + part / 2)
            self._computed += part
            budget -= part
            if self._computed < self._begun.prompt:
                break
            finished += 1
            self._context = np.append(self._context, self._begun.prompt + 1)
            self._left = np.append(self._left, self._begun.output - 1)
            self._begun = None
        return tokens, attended, finished
