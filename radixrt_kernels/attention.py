"""Attention of one step over a paged KV cache: planned once per step, computed once per layer."""

import torch

from radixrt_kernels import native

if native is not None:
    _AttentionPlan = native.AttentionPlan

SCALE_BYTES = 2
"""Of a coded head, behind its codes. A head in an int8 cache is ``head_dim`` integers of at most
127 and the bfloat16 by which they are multiplied. Keys are rotated before they are rounded: each
block of as many features as the largest power of two that divides ``head_dim`` is multiplied by a
Hadamard matrix, so that no large feature takes the precision of the others. Queries are rotated
when they are read."""

KEYS_PER_CUT = 256
"""A multiple of 64. Keys are cut at the multiples of it, counted from the beginning of each
sequence; the results of the cuts are folded into one another in ascending order. Threads, batch and
shared prefixes decide who computes which cuts, and so change no bit of the result. Another value
changes the last bits of every result."""


class AttentionPlan:
    """The ragged batch of one step, checked and divided into tasks.

    Sequence ``i`` has the queries ``qo_indptr[i]:qo_indptr[i+1]`` of the flat batch. They are its
    last positions. Its keys are in the pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``. The last
    of these pages has ``last_page_len[i]`` tokens.

    Example, the prefill of two prompts with 3 and 2 tokens into pages of 2 tokens:
        >>> import torch
        >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> plan = AttentionPlan(
        ...     qo_indptr=int32(0, 3, 5),
        ...     kv_indptr=int32(0, 2, 3),
        ...     last_page_len=int32(1, 2),
        ...     kv_indices=int32(4, 7, 1),  # pages 4 and 7, page 1
        ...     kv_slots=torch.tensor([8, 9, 14, 2, 3]),
        ...     page_size=2,
        ... )
        >>> query = torch.randn(5, 8, 64)
        >>> key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
        >>> key_cache, value_cache = torch.zeros(10, 2, 2, 64), torch.zeros(10, 2, 2, 64)
        >>> output = plan.attend(query, key, value, key_cache, value_cache, scale=64**-0.5)
        >>> output.shape
        torch.Size([5, 8, 64])
        >>> torch.allclose(output[0, 0], value[0, 0])  # the first token sees only itself
        True
        >>> torch.equal(key_cache[7, 0], key[2])
        True
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
            kv_slots: [num_tokens] int64, ``page * page_size + offset`` for the key and value of
                each new token
            page_size: tokens per page
            shared_prefixes: ([groups + 1], [groups]) int32. Group ``g`` has the consecutive
                sequences ``first[g]:first[g+1]``; their first ``second[g]`` pages are equal and
                precede all their queries. The cuts (``KEYS_PER_CUT``) that lie wholly in these
                pages are read once per group.

        Raises:
            ValueError: the arguments contradict one another.
        """
        self._plan = _AttentionPlan(
            qo_indptr,
            kv_indptr,
            last_page_len,
            kv_indices,
            kv_slots,
            page_size,
            shared_prefixes,
            KEYS_PER_CUT,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor | None,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        value_dim: int | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into the cache, then compute causal attention over it.

        A cache of latents is one tensor: the first ``value_dim`` features of a key are its value.

        Args:
            query: [num_tokens, num_heads, head_dim], float32, bfloat16 or float16; head_dim must be
                even
            key, value: [num_tokens, num_kv_heads, head_dim or value_dim] of the same dtype; all
                three may be views of one projection. Both None: they are in the cache already,
                which an earlier layer shares with this one. Of latents, value is None
            key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim] of
                the same dtype, or coded heads: int8 with SCALE_BYTES behind the features. None as
                value_cache: latents, and in int8 the value has a scale behind it, and so have the
                other features
            scale: factor of the scores, usually ``head_dim ** -0.5``
            sliding_window: number of visible positions, including the query's own; None: all
            soft_cap: replace scores by ``soft_cap * tanh(scores / soft_cap)``; None: no cap
            sinks: float32 [num_heads], a score of each head that takes part in every softmax and
                has no value; None: none
            value_dim: features of a value; None: as many as a key has

        Returns:
            [num_tokens, num_heads, value_dim] of the query's dtype

        Raises:
            ValueError: a tensor does not fit the plan or the others.
        """
        output = query.new_empty((*query.shape[:2], value_dim or query.shape[2]))
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
            sinks,
        )
        return output

    def attend_into(self, *arguments: torch.Tensor | float | None) -> None:
        """Same as :meth:`attend` with positional arguments: query, key, value, key cache, value
        cache, output, scale, window, soft cap, sinks. 0 disables the window or the soft cap, None
        the sinks."""
        self._plan.attend(*arguments)
