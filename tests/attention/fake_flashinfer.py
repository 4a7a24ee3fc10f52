"""FlashInfer without its kernels: the same calls, computed one row and one head at a time.

What the library demands of its arguments is checked, and every call is kept, so that a test can hold them against the
real signatures. Numbers come from the definition of attention alone.
"""

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
        workspace = arguments[0]
        assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 16 == 0
        self.in_graph = options.get("use_cuda_graph", False)
        self.options = options
        self.planned: _Plan | None = None
        self.num_plans = 0

    def reset_workspace_buffer(self, *arguments: Any) -> None:
        self.library.note(f"{self.name}.reset_workspace_buffer", (None, *arguments), {})

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

    def _store(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Copied, since the caller may reuse its tensors; in a graph, to where its kernels look for them."""
        buffer = self.options.get(name, self.options.get(f"{name}fer"))
        if not self.in_graph or buffer is None:
            return values.clone()
        assert buffer.dtype == torch.int32 and len(values) <= len(buffer)
        assert "indices" in name or len(values) == len(buffer), "a graph's batch size is fixed"
        buffer[: len(values)] = values
        return buffer[: len(values)]

    def run(self, query: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        self.library.note(f"{self.name}.run", (None, query, kv_cache), options)
        plan = self.planned
        assert plan is not None, "plan() comes before run()"
        assert query.dtype == plan.options["q_data_type"]
        assert kv_cache[0].dtype == kv_cache[1].dtype == plan.options["kv_data_type"]
        assert kv_cache[0].stride() == kv_cache[1].stride(), "another module would be compiled"
        assert query.shape == (int(plan.qo_indptr[-1]), plan.heads, plan.head_dim)
        out, lse = attend(query, kv_cache, plan)
        if options.get("out") is not None:
            out = options["out"].copy_(out)
        return (out, lse) if options.get("return_lse") else out


def attend(query: torch.Tensor, kv_cache: Any, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, heads, head_dim] and the base-2 logarithm of each softmax's sum [tokens, heads]."""
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
        for token in range(first, end):
            position = length - end + token
            seen = torch.ones(length, dtype=torch.bool)
            if plan.causal:
                seen &= torch.arange(length) <= position
            if window >= 0:
                seen &= torch.arange(length) >= position - window
            for head in range(plan.heads):
                kv_head = head * plan.kv_heads // plan.heads
                scores = keys[:, kv_head] @ query[token, head].double() * plan.options["sm_scale"]
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                scores = scores.masked_fill(~seen, -torch.inf)
                out[token, head] = scores.softmax(0) @ values[:, kv_head]
                lse[token, head] = scores.logsumexp(0) / torch.log(torch.tensor(2.0))
    return out.to(query.dtype), lse.float()


class BatchDecode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.library.note(f"{self.name}.plan", (None, *arguments), options)
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
        assert "causal" in options, "the default is to see everything"
        options = dict(options)
        self._keep(_Plan(*arguments, causal=options.pop("causal"), options=options))


class FakeFlashInfer:
    """In the place of the package.

    Attributes:
        calls: all that were made.
        wrappers: all that were made, in order.
    """

    def __init__(self, *, hopper: bool = True) -> None:
        self.calls: list[Call] = []
        self.wrappers: list[_Wrapper] = []
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

    def append_paged_kv_cache(self, *arguments: Any, **options: Any) -> None:
        self.note("append_paged_kv_cache", arguments, options)
        key, value, batch_indices, positions, caches, kv_indices, kv_indptr, _ = arguments
        assert key.dtype == caches[0].dtype and value.dtype == caches[1].dtype
        for ids in (batch_indices, positions, kv_indices, kv_indptr):
            assert ids.dtype == torch.int32
        page_size = caches[0].shape[1]
        for token in range(len(positions)):
            assert batch_indices[token] >= 0, "the kernel does not check"
            place = int(kv_indptr[int(batch_indices[token])]) * page_size + int(positions[token])
            page = int(kv_indices[place // page_size])
            caches[0][page, place % page_size] = key[token]
            caches[1][page, place % page_size] = value[token]

    def merge_state_in_place(self, *arguments: Any, **options: Any) -> None:
        self.note("merge_state_in_place", arguments, options)
        v, s, v_other, s_other = arguments
        mask = options.get("mask")
        for token in range(len(v)):
            if mask is not None and not bool(mask[token]):
                continue
            sums = torch.stack((s[token].double().exp2(), s_other[token].double().exp2()))
            weights = (sums / sums.sum(0)).unsqueeze(-1)
            v[token] = (weights[0] * v[token].double() + weights[1] * v_other[token].double()).to(v.dtype)  # fmt: skip
            s[token] = sums.sum(0).log2().float()
