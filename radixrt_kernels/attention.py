"""Attention of one step over a paged KV cache: planned once, computed for each layer."""

import torch

from radixrt_kernels import native

if native is not None:
    _AttentionPlan = native.AttentionPlan


class AttentionPlan:
    """The ragged batch of one step, checked and cut into tasks.

    Sequence ``i`` has queries ``qo_indptr[i]:qo_indptr[i+1]`` of the flat batch, which are its last positions. Its keys lie
    in pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``, the last of which holds ``last_page_len[i]`` tokens.
    """

    def __init__(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_slots: torch.Tensor,
        page_size: int,
        shared_prefixes: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            qo_indptr, kv_indptr: [batch + 1] int32
            last_page_len: [batch] int32, in 1..page_size
            kv_indices: [total_pages] int32
            kv_slots: [num_tokens] int64, page * page_size + offset where each new token's key and value go
            shared_prefixes: ([groups + 1], [groups]) int32: neighbouring sequences whose first so many pages are the
                same and lie before all their queries. They are read once for all of a group.

        Raises:
            ValueError: these contradict one another.
        """
        self._plan = _AttentionPlan(
            qo_indptr, kv_indptr, last_page_len, kv_indices, kv_slots, page_size, shared_prefixes
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into the cache, then attend over it causally.

        Args:
            query: [num_tokens, num_heads, head_dim], float32, bfloat16 or float16; head_dim is even
            key, value: [num_tokens, num_kv_heads, head_dim] of the same dtype; all three may be views of one projection
            key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim] of the same dtype
            scale: of the scores
            sliding_window: a query sees itself and the ``sliding_window - 1`` tokens before it
            soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``

        Returns:
            [num_tokens, num_heads, head_dim]

        Raises:
            ValueError: a tensor does not fit the plan or the others.
        """
        output = torch.empty(query.shape, dtype=query.dtype)
        self.attend_into(
            query,
            key,
            value,
            key_cache,
            value_cache,
            output,
            scale,
            sliding_window or 0,
            soft_cap or 0.0,
        )
        return output

    def attend_into(self, *arguments: torch.Tensor | float) -> None:
        """As :meth:`attend`, in one order: query, key, value, the two caches, the output, scale, window and soft cap
        (0: none)."""
        self._plan.attend(*arguments)
