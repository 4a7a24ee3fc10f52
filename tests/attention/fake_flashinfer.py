"""FlashInfer without its kernels: the same calls, computed one row at a time.

What the library demands of its arguments is checked, and every call is kept, so that a test can
hold them against the real signatures. Numbers come from the definition of attention alone.
"""

import math
import types
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass
class Call:
    name: str
    """Dotted, within the package."""
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class _Plan:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    options: dict[str, Any] = field(default_factory=dict)


class _Wrapper:
    name: str

    def __init__(self, library: "FakeFlashInfer", *arguments: Any, **options: Any) -> None:
        self.library = library
        library.note(self.name, (*arguments,), options)
        self.backend = options.get("backend")
        self._may_fail("__init__")
        workspace = arguments[0]
        assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 16 == 0
        self.in_graph = options.get("use_cuda_graph", False)
        self.options = options
        self.plan_buffer = torch.zeros(8, dtype=torch.uint8)
        self.mark = 0
        self.num_launches = 0
        self.planned: _Plan | None = None
        self.num_plans = 0
        self._cached_module = types.SimpleNamespace(paged_run=self._paged_run)

    def _may_fail(self, place: str) -> None:
        if self.backend == "fa3" and self.library.fa3_fails_in == place:
            raise RuntimeError(f"no kernel image for FA3 in {place}")

    def reset_workspace_buffer(self, *arguments: Any) -> None:
        self.library.note(f"{self.name}.reset_workspace_buffer", (None, *arguments), {})
        self.plan_buffer = plain(arguments[1])

    def _keep(self, plan: _Plan) -> None:
        for host in (plan.qo_indptr, plan.kv_indptr, plan.last_page_len):
            assert host.device.type == "cpu" and host.dtype == torch.int32
        assert plan.kv_indices.dtype == torch.int32
        assert plan.qo_indptr[0] == 0 and plan.kv_indptr[0] == 0
        assert len(plan.qo_indptr) == len(plan.kv_indptr) == len(plan.last_page_len) + 1
        assert plan.kv_indptr[-1] == len(plan.kv_indices)
        empty = plan.kv_indptr.diff() == 0
        assert ((plan.last_page_len >= 1) | empty).all()
        assert (plan.last_page_len <= plan.page_size).all()
        assert {"q_data_type", "kv_data_type", "sm_scale"} <= plan.options.keys()
        self.planned = replace(
            plan,
            qo_indptr=self._store(plan.qo_indptr, "qo_indptr_buf"),
            kv_indptr=self._store(plan.kv_indptr, "paged_kv_indptr_buf"),
            kv_indices=self._store(plan.kv_indices, "paged_kv_indices_buf"),
            last_page_len=self._store(plan.last_page_len, "paged_kv_last_page_len_buf"),
        )
        self.num_plans += 1
        self._leave_mark()

    def _leave_mark(self) -> None:
        """What a plan tells the kernels lies in a buffer that several wrappers may have."""
        FakeFlashInfer.num_plans += 1
        self.mark = FakeFlashInfer.num_plans
        self.plan_buffer[:8].view(torch.int64)[0] = self.mark

    def _store(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Copied, since the caller may reuse its tensors; in a graph, to where its kernels look for
        them."""
        buffer = self.options.get(name, self.options.get(f"{name}fer"))
        if not self.in_graph or buffer is None:
            return values.clone()
        assert buffer.dtype == torch.int32 and len(values) <= len(buffer)
        assert "indices" in name or len(values) == len(buffer), "a graph's batch size is fixed"
        plain(buffer)[: len(values)] = values
        return plain(buffer[: len(values)])

    def run(self, query: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        self.library.note(f"{self.name}.run", (None, query, kv_cache), options)
        out, lse = options.get("out"), options.get("lse")
        if out is None:
            out = torch.empty_like(query)
        if options.get("return_lse"):
            lse = torch.empty(query.shape[:2])
        # As the library's own: the compiled module gets all that it has prepared, in one call.
        self._cached_module.paged_run(self.plan_buffer, query, *kv_cache, out, lse, self.mark)
        return (out, lse) if options.get("return_lse") else out

    def _paged_run(
        self,
        plan_buffer: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mark: int,
    ) -> None:
        """What the compiled module computes."""
        self._may_fail("run")
        self.num_launches += 1
        query, kv_cache = plain(query), plain((keys, values))
        assert mark == self.mark and plan_buffer is self.plan_buffer, "of another plan"
        plan = self.planned
        assert plan is not None, "plan() comes before run()"
        assert self.plan_buffer[:8].view(torch.int64)[0] == self.mark, "the plan was overwritten"
        assert query.dtype == plan.options["q_data_type"]
        assert kv_cache[0].dtype == kv_cache[1].dtype == plan.options["kv_data_type"]
        assert kv_cache[0].stride() == kv_cache[1].stride(), "another module would be compiled"
        assert query.shape == (int(plan.qo_indptr[-1]), plan.heads, plan.head_dim)
        assert len(query), "an empty grid"
        assert out.shape == query.shape and out.dtype == query.dtype
        assert lse is None or (lse.shape == query.shape[:2] and lse.dtype == torch.float32)
        for part in (query, *kv_cache, out):
            assert part.stride(-1) == 1, "must be contiguous at last dimension"
        attended, sums = attend(query, kv_cache, plan)
        out.copy_(attended)
        if lse is not None:
            lse.copy_(sums)


def attend(query: torch.Tensor, kv_cache: Any, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, heads, head_dim] and the base-2 logarithm of each softmax's sum [tokens,
    heads]."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    window, cap = plan.options.get("window_left", -1), plan.options.get("logits_soft_cap")
    for row in range(len(plan.last_page_len)):
        first, end = int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1])
        pages = plan.kv_indices[int(plan.kv_indptr[row]) : int(plan.kv_indptr[row + 1])].long()
        if not len(pages):
            continue
        length = (len(pages) - 1) * plan.page_size + int(plan.last_page_len[row])
        keys, values = (cache[pages].to(torch.float64).flatten(0, 1)[:length] for cache in kv_cache)
        # Every query head sees the keys of its KV head: [heads, length, head_dim]
        keys, values = (
            part.repeat_interleave(plan.heads // plan.kv_heads, dim=1).transpose(0, 1)
            for part in (keys, values)
        )
        scores = query[first:end].double().transpose(0, 1) @ keys.mT * plan.options["sm_scale"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
        if plan.causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if window >= 0:
            scores = scores.masked_fill(distance > window, -torch.inf)
        out[first:end] = (scores.softmax(-1) @ values).transpose(0, 1)
        lse[first:end] = (scores.logsumexp(-1) / math.log(2)).T
    return out.to(query.dtype), lse.float()


class BatchDecode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.library.note(f"{self.name}.plan", (None, *arguments), options)
        arguments = plain(arguments)
        indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size = arguments
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(
            _Plan(one_each, indptr, indices, last_page_len, heads, kv_heads, head_dim,
                  page_size, causal=False, options=options)
        )  # fmt: skip


class BatchPrefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.library.note(f"{self.name}.plan", (None, *arguments), options)
        arguments = plain(arguments)
        self._may_fail("plan")
        assert "causal" in options, "the default is to see everything"
        options = dict(options)
        self._keep(_Plan(*arguments, causal=options.pop("causal"), options=options))


@dataclass
class MlaMetadata:
    """What ``MLAPlanMetadata.csr`` makes."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor


class BatchMLA(_Wrapper):
    """One tensor of latents; queries of any number a row."""

    name = "BatchMLAPagedAttentionWrapper"

    def plan(self, **options: Any) -> None:
        self.library.note(f"{self.name}.plan", (None,), options)
        self._may_fail("plan")
        tables: MlaMetadata = options["metadata"]
        page_size, heads = options["page_size"], options["num_heads"]
        assert heads & (heads - 1) == 0, "at some lengths, a visible key would be omitted"
        assert options["causal"] and options["q_data_type"] == options["kv_data_type"]
        lengths, pages = plain(tables.kv_len_arr), plain(tables.kv_indptr).diff()
        assert lengths.device.type == "cpu" and lengths.dtype == torch.int32
        assert (-(-lengths // page_size) == pages).all()
        last_page_len = (lengths - 1) % page_size + 1
        width = options["head_dim_ckv"] + options["head_dim_kpe"]
        self._keep(
            _Plan(plain(tables.qo_indptr), plain(tables.kv_indptr), plain(tables.kv_indices),
                  last_page_len, heads, 1, width, page_size, causal=True, options=options)
        )  # fmt: skip

    def _store(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """The library's names of the buffers are others, and one has lengths of rows."""
        own = {"qo_indptr_buf": "qo_indptr", "paged_kv_indptr_buf": "kv_indptr"}
        own |= {"paged_kv_indices_buf": "kv_indices"}
        if (found := own.get(name)) is None:
            assert not self.in_graph or len(self.options["kv_len_arr"]) == len(values)
            return values.clone()
        return super()._store(values, found)

    def run(self, **options: Any) -> torch.Tensor:
        self.library.note(f"{self.name}.run", (None,), options)
        self._may_fail("run")
        self.num_launches += 1
        query, cache = plain(options["query"]), plain(options["kv_cache"])
        plan = self.planned
        assert plan is not None, "plan() comes before run()"
        latent = plan.options["head_dim_ckv"]
        assert query.dtype == cache.dtype == plan.options["q_data_type"]
        assert query.shape == (int(plan.qo_indptr[-1]), plan.heads, plan.head_dim) and len(query)
        assert cache.dim() == 3 and cache.shape[1:] == (plan.page_size, plan.head_dim)
        assert query.stride(-1) == cache.stride(-1) == 1
        attended, _ = attend(query, (cache.unsqueeze(2), cache.unsqueeze(2)), plan)
        out = options.get("out")
        if out is None:
            out = torch.empty(*query.shape[:2], latent, dtype=query.dtype)
        assert out.shape == (*query.shape[:2], latent) and out.dtype == query.dtype
        plain(out).copy_(attended[..., :latent])
        return out


class FakeFlashInfer:
    """In the place of the package.

    Attributes:
        calls: all that were made.
        wrappers: all that were made, in order.
    """

    num_plans = 0

    def __init__(self, *, hopper: bool = True, fa3_fails_in: str | None = None) -> None:
        """
        Args:
            fa3_fails_in: "__init__", "plan" or "run" of a wrapper for FA3.
        """
        self.fa3_fails_in = fa3_fails_in
        self.calls: list[Call] = []
        self.wrappers: list[_Wrapper] = []
        self.mla = types.SimpleNamespace(MLAPlanMetadata=types.SimpleNamespace(csr=MlaMetadata))
        self.utils = types.SimpleNamespace(is_sm90a_supported=lambda device: hopper)

    def note(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.calls.append(Call(name, arguments, options))

    def _make(self, kind: type[_Wrapper], *arguments: Any, **options: Any) -> _Wrapper:
        wrapper = kind(self, *arguments, **options)
        self.wrappers.append(wrapper)
        return wrapper

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> _Wrapper:
        return self._make(BatchDecode, *arguments, **options)

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> _Wrapper:
        return self._make(BatchPrefill, *arguments, **options)

    def BatchMLAPagedAttentionWrapper(self, *arguments: Any, **options: Any) -> _Wrapper:
        return self._make(BatchMLA, *arguments, **options)

    def append_paged_kv_cache(self, *arguments: Any, **options: Any) -> None:
        self.note("append_paged_kv_cache", arguments, options)
        key, value, batch_indices, positions, caches, kv_indices, kv_indptr, _ = plain(arguments)
        assert key.dtype == caches[0].dtype and value.dtype == caches[1].dtype
        assert len(key) == len(value) == len(batch_indices) == len(positions) > 0, "an empty grid"
        assert key.shape[1:] == caches[0].shape[2:] and value.shape[1:] == caches[1].shape[2:]
        assert caches[0].stride() == caches[1].stride(), "k_strides must equal v_strides"
        for states in (key, value, *caches):
            assert states.stride(-1) == 1, "must be contiguous at last dimension"
        for ids in (batch_indices, positions, kv_indices, kv_indptr):
            assert ids.is_contiguous()
        for ids in (batch_indices, positions, kv_indices, kv_indptr):
            assert ids.dtype == torch.int32
        assert (batch_indices >= 0).all(), "the kernel does not check"
        page_size = caches[0].shape[1]
        places = kv_indptr[batch_indices].long() * page_size + positions
        pages, offsets = kv_indices[places // page_size].long(), places % page_size
        for cache, states in zip(caches, (key, value), strict=True):
            as_bytes(cache)[pages, offsets] = as_bytes(states)

    def merge_state_in_place(self, *arguments: Any, **options: Any) -> None:
        self.note("merge_state_in_place", arguments, options)
        v, s, v_other, s_other = plain(arguments)
        assert v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2] and len(v)
        assert s.dtype == s_other.dtype == torch.float32 and v.dtype == v_other.dtype
        sums = torch.stack((s.double().exp2(), s_other.double().exp2()))  # [2, tokens, heads]
        weights = (sums / sums.sum(0)).unsqueeze(-1)
        merged = (weights[0] * v.double() + weights[1] * v_other.double()).to(v.dtype)
        mask = plain(options["mask"])
        v[mask] = merged[mask]
        s[mask] = sums.sum(0).log2().float()[mask]


def plain(value: Any) -> Any:
    """Without what a fake device adds to its tensors: a kernel may read them."""
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Torch moves no fp8 about, but bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
