"""What one step's flat batch looks like to attention: the ragged layout that FlashInfer speaks."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Sequences of a step that begin with the same pages stand together, so that a backend may read these once for all.

    Every sequence is in exactly one group, and groups follow one another: group ``g`` is sequences
    ``group_indptr_cpu[g]:group_indptr_cpu[g+1]``, whose first ``num_pages_cpu[g]`` pages are the same and lie wholly before
    each of their queries. In a group of one it is 0. A backend may ignore all this.
    """

    group_indptr_cpu: Tensor  # [groups + 1] int32
    num_pages_cpu: Tensor  # [groups] int32


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """All scheduled tokens of a step, prefill and decode mixed, as one flat batch.

    Sequence ``i`` contributes query tokens ``qo_indptr[i]:qo_indptr[i+1]`` of the flat batch. Its KV,
    the new tokens included, lies in pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``, the last of which
    holds ``last_page_len[i]`` tokens. Queries are the last ``q_len`` positions of the sequence, so causal
    masks are aligned at the bottom right.

    The ``*_cpu`` tensors are on the host (pinned where that matters): FlashInfer plans on the host.
    """

    qo_indptr_cpu: Tensor  # [batch + 1] int32
    kv_indptr_cpu: Tensor  # [batch + 1] int32, counts pages
    last_page_len_cpu: Tensor  # [batch] int32, in 1..page_size
    kv_indices: Tensor  # [total_pages] int32, on the device
    kv_locations: (
        Tensor  # [num_tokens] int64, on the device: page * page_size + offset of each new token
    )
    page_size: int
    shared_prefixes: SharedPrefixes | None = None
    """None: nothing is known to be shared."""

    @property
    def num_tokens(self) -> int:
        return self.kv_locations.numel()

    def kv_lengths(self) -> Tensor:
        """Tokens of KV of each sequence, the new ones included: [batch] int32 on the host."""
        pages = self.kv_indptr_cpu[1:] - self.kv_indptr_cpu[:-1]
        return (pages - 1) * self.page_size + self.last_page_len_cpu
