"""Attention in both directions for encoders: every token of a prompt sees all of it. No KV is
kept."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import AttentionBackend, AttentionInputs
from radixrt.attention.metadata import AttentionMetadata

LONGEST_OVER_SHORTEST = 1.25
"""Largest ratio in a group, whose prompts are padded to the longest of it."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts of similar lengths, which are attended in one batched computation."""

    rows: Tensor  # [prompts, longest] rows of the flat batch; behind a shorter prompt its first row again
    within: Tensor | None
    """[prompts, longest] bool, False behind a shorter prompt; None: all are equally long."""
    filled: Tensor | None
    """[tokens] int64, the places of the flat ``rows`` that are no padding. An index by ``within``
    would wait for the device."""


class BidirectionalAttention(AttentionBackend):
    """Dense attention within each prompt of a step.

    Two prompts, of one token and of two; the first sees itself alone:

    >>> from radixrt.attention.backend import AttentionSpec
    >>> spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=8**-0.5)
    >>> attention = BidirectionalAttention()
    >>> attention.plan_prompts([1, 2], torch.device("cpu"))
    >>> query, key, value = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    >>> output = attention.attend(AttentionInputs(query, key, value, (), spec))
    >>> output.shape, torch.allclose(output[0], value[0].expand(2, 8))
    (torch.Size([3, 2, 8]), True)
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        """Not for paged steps: see :meth:`plan_prompts`."""
        raise NotImplementedError("an encoder's prompts have no pages")

    def plan_prompts(self, lengths: list[int], device: torch.device) -> None:
        """Prepare for a step of whole prompts, one behind the other in the flat batch."""
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        groups: list[list[int]] = []
        for prompt in order:
            if not groups or lengths[prompt] > LONGEST_OVER_SHORTEST * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(prompt)
        self._groups = [
            _group([starts[one] for one in group], [lengths[one] for one in group], device)
            for group in groups
        ]
        self._masks = {}

    def attend(self, step: AttentionInputs) -> Tensor:
        """See ``AttentionBackend.attend``; there is no cache, and there are no sinks. In a layer
        with a sliding window a token sees those at a smaller distance, on both sides."""
        query, key, value, spec = step.query, step.key, step.value, step.spec
        assert key is not None and value is not None, "no layer of an encoder reads another's cache"
        if spec.sliding_window not in self._masks:
            masks = [_mask(group, spec.sliding_window) for group in self._groups]
            self._masks[spec.sliding_window] = masks
        output = torch.empty_like(query)
        for group, mask in zip(self._groups, self._masks[spec.sliding_window], strict=True):
            # each [prompts, heads, longest, head_dim]
            parts = [states[group.rows].transpose(1, 2) for states in (query, key, value)]
            if query.device.type == "cpu":  # torch's kernel is slower in half precision
                parts = [part.float() for part in parts]
            queries, keys, values = parts
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            attended = attended.transpose(1, 2).to(query.dtype)
            if group.filled is None:
                output[group.rows] = attended
            else:
                rows, filled = group.rows.flatten(), group.filled
                output[rows[filled]] = attended.flatten(0, 1)[filled]
        return output


def _group(starts: list[int], lengths: list[int], device: torch.device) -> _Group:
    begins, sizes = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    offsets = torch.arange(max(lengths))
    within = offsets < sizes
    rows = begins + torch.where(within, offsets, 0)
    if within.all():
        return _Group(rows.to(device), None, None)
    filled = within.flatten().nonzero().squeeze(1)
    return _Group(rows.to(device), within.to(device), filled.to(device))


def _mask(group: _Group, window: int | None) -> Tensor | None:
    """[prompts or 1, 1, queries or 1, keys] bool: the keys that a query sees; None: all."""
    mask = None if group.within is None else group.within[:, None, None]
    if window is None or window >= group.rows.shape[1]:
        return mask
    place = torch.arange(group.rows.shape[1], device=group.rows.device)
    near = ((place[:, None] - place).abs() < window)[None, None]
    return near if mask is None else mask & near
