"""Attention on the CPU by the native kernels: flash-style, shared prefixes read once."""

import torch
from torch import Tensor

from radixrt.attention.backend import AttentionSpec, KVCache
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.setup import AttentionSetup
from radixrt.base.errors import ConfigError
from radixrt_kernels import available, missing_because, tape
from radixrt_kernels.attention import AttentionPlan

CPU_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuBackend:
    """Hands each step to ``radixrt_kernels``, which cuts it into tasks for all threads."""

    def __init__(self, setup: AttentionSetup) -> None:
        device = setup.device.torch_device
        if device.type != "cpu":
            raise ConfigError(
                f"--attention-backend cpu computes on the CPU, and the model is on {device}; use --device cpu."
            )
        if setup.kv_dtype not in CPU_CACHE_DTYPES:
            raise ConfigError(
                f"--attention-backend cpu reads no KV cache of {setup.kv_dtype}; use --kv-cache-dtype auto."
            )
        if not available():
            raise ConfigError(
                f"--attention-backend cpu needs the native kernels, and {missing_because}; torch_reference works "
                "without them."
            )
        self._cascade = setup.cascade
        self._plan: AttentionPlan | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """See ``AttentionBackend.plan``."""
        shared = metadata.shared_prefixes if self._cascade else None
        self._plan = AttentionPlan(
            metadata.qo_indptr_cpu,
            metadata.kv_indptr_cpu,
            metadata.last_page_len_cpu,
            metadata.kv_indices,
            metadata.kv_locations,
            metadata.page_size,
            (shared.group_indptr_cpu, shared.num_pages_cpu) if shared else None,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, spec: AttentionSpec
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        output = torch.empty(query.shape, dtype=query.dtype)
        tape.call(
            self._attend_by_plan,
            query,
            key,
            value,
            *kv_cache,
            output,
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
        )
        return output

    def _attend_by_plan(self, *arguments: Tensor | float) -> None:
        """By the plan of the step that is computed, which is another one when a tape is replayed."""
        assert self._plan is not None, "plan() comes before attend()"
        self._plan.attend_into(*arguments)
