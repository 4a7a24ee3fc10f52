"""Rotary position embedding (Su et al., 2021), with the context extensions that transformers
knows."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.hf_config import head_dim
from radixrt.layers.kernels.interface import KernelLayer

_PART = 1024
"""Positions of the table that are computed at once. The angles of all positions would take new
memory, page by page: a third of the time."""
FIRST_POSITIONS = 2 * _PART
"""Positions of the table that are computed at the start on a CPU. A long context's table takes more
memory than some models have weights: 64 MiB for the two tables of Gemma 3 270M."""


class RotaryEmbedding(KernelLayer):
    """Rotates queries and keys by their positions; one instance serves all layers that agree on it.

    Some checkpoints choose their frequencies by the length of a sequence (``dynamic``,
    ``longrope``), so that keys cached under one choice cannot be used under another. Here the
    choice is made once for all sequences, by the served context length. Where that lies within the
    original context, every prompt gets the numbers of transformers; else only prompts longer than
    the original context do.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    >>> rotary = RotaryEmbedding(config, context_length=16)
    >>> rotary.cos_sin.shape
    torch.Size([16, 8])
    >>> query, key = torch.ones(2, 4, 8), torch.ones(2, 1, 8)
    >>> rotated, _ = rotary(torch.tensor([0, 3]), query, key)
    >>> rotated.shape, torch.equal(rotated[0], query[0]), torch.equal(rotated[1], query[1])
    (torch.Size([2, 4, 8]), True, False)
    """

    cos_sin: Tensor

    def __init__(
        self,
        config: Any,
        context_length: int,
        layer_type: str | None = None,
        interleaved: bool = False,
        by_parts: bool = False,
    ) -> None:
        """
        Args:
            layer_type: ``sliding_attention`` or ``full_attention`` where the two differ (Gemma 3).
            interleaved: the checkpoint's pairs are neighbours (ERNIE 4.5), not features of the two
                halves of a head.
            by_parts: on a CPU, leave positions from FIRST_POSITIONS on to :meth:`compute_up_to`.

        Raises:
            ConfigError: a rope type that transformers does not know.
        """
        super().__init__()
        self.interleaved = interleaved
        frequencies, attention_factor = _frequencies(config, context_length, layer_type)
        table = torch.empty(context_length, 2 * len(frequencies), dtype=torch.float32)
        self.register_buffer("cos_sin", table, persistent=False)
        # [context_length, rotary_dim] float32, cosines then sines: the layout of FlashInfer's
        # kernel
        self._frequencies, self._factor = frequencies, attention_factor
        self._num_computed = 0
        whole = context_length
        self.compute_up_to(min(whole, FIRST_POSITIONS) if by_parts and table.is_cpu else whole)

    def compute_up_to(self, end: int) -> None:
        """Compute the rows of the positions below ``end``, as far as they are not there yet."""
        table = self.cos_sin
        while self._num_computed < min(end, len(table)):
            start = self._num_computed
            positions = torch.arange(start, min(start + _PART, len(table)), device=table.device)
            angles = torch.outer(positions.float(), self._frequencies)
            rows = table[start : start + _PART]
            rows.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self._factor))
            self._num_computed += len(rows)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions [num_tokens]; query and key [num_tokens, heads, head_dim], returned rotated.
        Both may be overwritten. The key may have no heads.

        Interleaved heads may be returned in the order of halves: scores do not depend on an order
        that queries and keys share.
        """
        return self.kernels.rotate(positions, query, key, self.cos_sin, self.interleaved)


class AxesRotary(RotaryEmbedding):
    """Rotates by positions in three axes: time, height and width (M-RoPE, Wang et al., 2024). Each
    rotated pair has one axis. In a text the three are the same, so :meth:`forward` is as ever.

    >>> from types import SimpleNamespace
    >>> rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    >>> rotary = AxesRotary(SimpleNamespace(head_dim=8, rope_parameters=rope), context_length=16)
    >>> axes = torch.tensor([[3, 3], [3, 4], [3, 5]])
    >>> with rotary.at(axes):
    ...     placed, _ = rotary(torch.zeros(2), torch.ones(2, 1, 8), torch.ones(2, 1, 8))
    >>> text, _ = rotary(torch.tensor([3, 4]), torch.ones(2, 1, 8), torch.ones(2, 1, 8))
    >>> torch.equal(placed[0], text[0]), (placed[1] == text[1]).flatten().tolist()
    (True, [False, False, True, False, False, False, True, False])
    """

    def __init__(
        self, config: Any, context_length: int, *, mixed: bool = False, by_parts: bool = False
    ) -> None:
        """
        Args:
            mixed: the axes take turns from pair to pair (Qwen3-VL); else each has the pairs of a
                section (Qwen2.5-VL).
        """
        super().__init__(config, context_length, by_parts=by_parts)
        pairs = len(self._frequencies)
        sections = config.rope_parameters["mrope_section"]
        if len(sections) != 3 or sum(sections) != pairs:
            raise ConfigError(
                f"The checkpoint's config.json has 'mrope_section': {sections}, which are not three numbers whose sum is {pairs}."
            )
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        if mixed:
            axis = torch.arange(pairs) % 3
            axis[torch.arange(pairs) >= 3 * torch.tensor(sections)[axis]] = 0
        self._axis = torch.cat((axis, axis))  # [rotary_dim], of cosines and sines
        self._placed: Tensor | None = None

    @contextlib.contextmanager
    def at(self, axes: Tensor) -> Iterator[None]:
        """Within, :meth:`forward` does not read positions: row ``i`` of the step is at ``axes[:,
        i]``.

        Args:
            axes: [3, num_tokens] int64, time, height and width.
        """
        rows = self.cos_sin[axes]  # [3, num_tokens, rotary_dim]
        self._placed = torch.where(
            self._axis == 0, rows[0], torch.where(self._axis == 1, rows[1], rows[2])
        )
        try:
            yield
        finally:
            self._placed = None

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._placed is None:
            return super().forward(positions, query, key)
        rows = torch.arange(len(self._placed))
        return self.kernels.rotate(rows, query, key, self._placed, self.interleaved)


class NoRotary(RotaryEmbedding):
    """In the place of a rotary embedding where no layer rotates."""

    def __init__(self) -> None:
        KernelLayer.__init__(self)

    def compute_up_to(self, end: int) -> None:
        """There is nothing to compute."""


def _frequencies(config: Any, context_length: int, layer_type: str | None) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair [rotary_dim / 2], and the factor of cos and sin."""
    if getattr(config, "is_heterogeneous", False):  # heads of other sizes in layers of other types
        config = config.per_layer_config[layer_type]
    parameters = (
        config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    )
    rope_type = parameters["rope_type"]
    fixed_ntk = rope_type == "dynamic" and parameters.get("alpha")  # Hunyuan's, for any length
    if rope_type in ("default", "llama3") or fixed_ntk:
        dim = int(head_dim(config) * (parameters.get("partial_rotary_factor") or 1.0))
        base = parameters["rope_theta"] * (fixed_ntk ** (dim / (dim - 2)) if fixed_ntk else 1.0)
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        return frequencies if rope_type != "llama3" else _llama3(frequencies, parameters), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes half a second

    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"The checkpoint's rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_INIT_FUNCTIONS)}."
        )
    return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=context_length, layer_type=layer_type)


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """The frequencies [dim / 2] of Llama 3.1 and later: of pairs that turn often in the original
    context as they were, of slow ones divided by a factor, between them a ramp.

    transformers has this too, but takes a second of every start for it.
    """
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequencies / parameters["factor"], frequencies, ramp)
