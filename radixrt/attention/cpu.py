"""The attention backend of the native CPU kernels, which read a shared prefix once for all its
sequences."""

import torch
from torch import Tensor

from radixrt.attention.backend import AttentionBackend, AttentionInputs, AttentionSetup
from radixrt.attention.image_spans import ImageSpans
from radixrt.attention.metadata import AttentionMetadata
from radixrt.base.errors import ConfigError
from radixrt_kernels import available, missing_because, trace
from radixrt_kernels.attention import AttentionPlan

CPU_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def why_not(setup: AttentionSetup) -> str | None:
    """The reason for which the native kernels cannot serve this model, and the remedy; None: they
    can serve it."""
    device = setup.device.torch_device
    if device.type != "cpu":
        return f"it computes on the CPU, and the model is on {device}; use --device cpu"
    if setup.kv_dtype not in CPU_CACHE_DTYPES:
        return f"it reads no KV cache of {setup.kv_dtype}; use --kv-cache-dtype auto"
    if not available():
        return f"it needs the native kernels, and {missing_because}; torch_reference works without them"
    return setup.why_not_plain(latents=True)


class CpuBackend(AttentionBackend):
    """Hands each step to ``radixrt_kernels``, which cuts it into tasks for all threads."""

    def __init__(self, setup: AttentionSetup) -> None:
        """
        Raises:
            ConfigError: the native kernels cannot serve this model here.
        """
        if (reason := why_not(setup)) is not None:
            raise ConfigError(f"--attention-backend cpu can't be used: {reason}.")
        self._setup = setup
        self._metadata: AttentionMetadata | None = None
        self._plan: AttentionPlan | None = None
        self._images: ImageSpans | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._images = ImageSpans(metadata) if metadata.image_spans else None
        groups = None
        if self._setup.cascade and (shared := metadata.shared_prefixes) is not None:
            groups = (torch.from_numpy(shared.indptr), torch.from_numpy(shared.num_pages))
        self._plan = AttentionPlan(
            metadata.qo_indptr_cpu,
            metadata.kv_indptr_cpu,
            metadata.last_page_len_cpu,
            metadata.kv_indices,
            metadata.kv_locations,
            metadata.page_size,
            groups,
        )

    def for_rows(self, rows: Tensor) -> "CpuBackend | None":
        assert self._metadata is not None, "plan() comes before for_rows()"
        if (metadata := self._metadata.of_rows(rows)) is None:
            return None
        narrowed = CpuBackend(self._setup)
        narrowed.plan(metadata)
        return narrowed

    def attend(self, step: AttentionInputs) -> Tensor:
        spec, output = step.spec, step.new_output()
        key_cache, *value_caches = step.kv_cache
        value, value_cache = (step.value, *value_caches) if value_caches else (None, None)
        trace.call(
            self._attend_by_plan,
            step.query,
            step.key,
            value,
            key_cache,
            value_cache,
            output,
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            step.sinks,
        )
        if self._images is not None:
            self._images.attend(step, output)
        return output

    def _attend_by_plan(self, *arguments: Tensor | float | None) -> None:
        """Use the plan of the current step: a tape repeats this call, and the plan has changed by
        then."""
        assert self._plan is not None, "plan() comes before attend()"
        self._plan.attend_into(*arguments)
