"""The plans for FlashInfer's kernels describe the step. The kernels' part is computed by
definition."""

import inspect
import itertools
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.attention import flashinfer, flashinfer_wrappers
from radixrt.attention.backend import AttentionInputs, AttentionSetup, AttentionSpec
from radixrt.attention.flashinfer import FlashInferBackend, lacks_kernels, why_not
from radixrt.attention.kv_spec import to_kv_dtype
from radixrt.attention.metadata import PrefixGroups
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.base.errors import ConfigError
from radixrt.device.device import load_flashinfer
from tests.attention.fake_flashinfer import BatchPrefill, FakeFlashInfer
from tests.attention.steps import Step, make_step, share, written_out
from tests.fake_device import FakeDevice

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)


@pytest.fixture(autouse=True)
def cascades_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost rule has a test of its own."""
    monkeypatch.setattr(flashinfer, "cascade_pays", lambda *arguments: True)


def setup_for(step: Step, *specs: AttentionSpec, **changes: Any) -> AttentionSetup:
    dtype = step.query.dtype
    size = step.metadata.page_size
    setup = AttentionSetup(specs, dtype, dtype, size, max_rows=16, max_pages=64)
    return replace(setup, **changes)


def attend(backend: Any, step: Step, spec: AttentionSpec) -> torch.Tensor:
    backend.plan(step.metadata)
    caches = step.key_cache.clone(), step.value_cache.clone()
    return backend.attend(
        AttentionInputs(step.query, step.key, step.value, caches, spec, step.sinks)
    )


def assert_attends(step: Step, spec: AttentionSpec, backend: Any) -> None:
    expected = written_out(step, spec)
    torch.testing.assert_close(attend(backend, step, spec).double(), expected, rtol=1e-4, atol=1e-5)


_lengths = st.integers(1, 9).flatmap(
    lambda new: st.tuples(st.sampled_from([1, new]), st.integers(0, 20))
)


@settings(max_examples=25)
@given(
    lengths=st.lists(_lengths, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2)]),
    window=st.sampled_from([None, 1, 4, 100]),
    soft_cap=st.sampled_from([None, 2.0]),
    hopper=st.booleans(),
    has_sinks=st.booleans(),
)
def test_any_mix_of_prefill_and_decode_is_the_definition(
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
    hopper: bool,
    has_sinks: bool,
) -> None:
    spec = AttentionSpec(*heads, 8, 0.3, window, soft_cap)
    step = make_step([(new, new + old) for new, old in lengths], page_size, spec, torch.float32)
    step.sinks = torch.linspace(-1.0, 3.0, heads[0]) if has_sinks else None
    assert_attends(step, spec, FlashInferBackend(setup_for(step, spec), FakeFlashInfer(hopper=hopper)))  # fmt: skip


def test_decodes_and_prefills_have_plans_of_their_own() -> None:
    step = make_step([(1, 9), (1, 20), (7, 11), (1, 4)], 4, PLAIN, torch.float32)
    library = FakeFlashInfer()
    attend(FlashInferBackend(setup_for(step, PLAIN), library), step, PLAIN)
    rows = [len(w.planned.last_page_len) for w in library.wrappers if w.planned]
    assert rows == [2, 2]


def test_each_kind_of_layer_is_planned_once_a_step() -> None:
    local, capped = replace(PLAIN, sliding_window=4), replace(PLAIN, soft_cap=3.0)
    step = make_step([(1, 9), (5, 11)], 4, PLAIN, torch.float32)
    library = FakeFlashInfer()
    backend = FlashInferBackend(setup_for(step, *[PLAIN, local, local, capped] * 3), library)
    backend.plan(step.metadata)
    assert sum(wrapper.num_plans for wrapper in library.wrappers) == 3 * 2
    for spec in (PLAIN, local, capped, local):
        caches = step.key_cache.clone(), step.value_cache.clone()
        result = backend.attend(AttentionInputs(step.query, step.key, step.value, caches, spec))
        torch.testing.assert_close(result.double(), written_out(step, spec), rtol=1e-4, atol=1e-5)
    assert sum(wrapper.num_plans for wrapper in library.wrappers) == 3 * 2


def test_the_library_prepares_a_steps_arguments_for_its_first_layer_alone() -> None:
    """Later layers put in their own queries, caches and outputs; a new plan begins anew."""
    library = FakeFlashInfer()
    step = make_step([(1, 9), (1, 20), (7, 11)], 4, PLAIN, torch.float32)
    backend = FlashInferBackend(setup_for(step, *[PLAIN] * 3), library)
    for _ in range(2):
        backend.plan(step.metadata)
        for layer in range(3):
            caches = step.key_cache * (1 + layer), step.value_cache * (1 + layer)
            query, key, value = (t * (1 + layer) for t in (step.query, step.key, step.value))
            result = backend.attend(AttentionInputs(query, key, value, caches, PLAIN))
            alone = FlashInferBackend(setup_for(step, PLAIN), FakeFlashInfer())
            alone.plan(step.metadata)
            caches = step.key_cache * (1 + layer), step.value_cache * (1 + layer)
            assert torch.equal(
                result, alone.attend(AttentionInputs(query, key, value, caches, PLAIN))
            )
    runs = [call for call in library.calls if call.name.endswith(".run")]
    assert len(runs) == 2 * 2  # decodes and prefills, of each plan
    assert sum(wrapper.num_launches for wrapper in library.wrappers) == 2 * 2 * 3


def test_arguments_that_can_not_be_told_apart_are_prepared_for_each_layer() -> None:
    library = FakeFlashInfer()
    step = make_step([(1, 9), (7, 11)], 4, PLAIN, torch.float32)
    backend = FlashInferBackend(setup_for(step, PLAIN), library)
    backend.plan(step.metadata)
    same = torch.stack((step.key_cache, step.value_cache)).nan_to_num(0).sum(0)
    for _ in range(2):
        backend.attend(AttentionInputs(step.query, step.key, step.value, (same, same), PLAIN))
    assert len([call for call in library.calls if call.name.endswith(".run")]) == 2 * 2


def test_the_cache_holds_what_the_reference_writes() -> None:
    step = make_step([(1, 9), (5, 11)], 4, PLAIN, torch.float32)
    caches = []
    for backend in (
        FlashInferBackend(setup_for(step, PLAIN), FakeFlashInfer()),
        TorchReferenceBackend(),
    ):
        backend.plan(step.metadata)
        pair = step.key_cache.clone(), step.value_cache.clone()
        backend.attend(AttentionInputs(step.query, step.key, step.value, pair, PLAIN))
        caches.append(torch.stack(pair))
    torch.testing.assert_close(*caches, equal_nan=True, rtol=0, atol=0)


def test_a_layer_reads_what_an_earlier_one_has_written() -> None:
    step = make_step([(1, 9), (5, 11)], 4, PLAIN, torch.float32)
    reads = replace(PLAIN, num_heads=2, sliding_window=3)
    backend = FlashInferBackend(setup_for(step, PLAIN, reads), FakeFlashInfer())
    backend.plan(step.metadata)
    caches = step.key_cache, step.value_cache
    backend.attend(AttentionInputs(step.query, step.key, step.value, caches, PLAIN))
    query = step.query[:, ::2].contiguous()
    result = backend.attend(AttentionInputs(query, None, None, caches, reads))
    expected = written_out(replace(step, query=query), reads)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- shared prefixes


@settings(max_examples=25)
@given(
    data=st.data(),
    group_sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4]),
    soft_cap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 5]),
    prefills=st.lists(st.integers(2, 5), max_size=2),
    graph=st.booleans(),
)
def test_reading_shared_pages_once_is_the_definition(
    data: st.DataObject,
    group_sizes: list[int],
    page_size: int,
    soft_cap: float | None,
    window: int | None,
    prefills: list[int],
    graph: bool,
) -> None:
    groups, lengths = [], []
    for size in group_sizes:
        pages = data.draw(st.integers(0, 4)) if size > 1 else 0
        groups.append((size, pages))
        lengths += [(1, pages * page_size + data.draw(st.integers(1, 12))) for _ in range(size)]
    lengths += [] if graph else [(new, new + 3) for new in prefills]
    spec = replace(PLAIN, soft_cap=soft_cap, sliding_window=window)
    step = share(
        make_step(lengths, page_size, spec, torch.float32),
        groups + [(1, 0)] * (len(lengths) - sum(group_sizes)),
    )
    library = FakeFlashInfer()
    backend: Any = FlashInferBackend(setup_for(step, spec), library)
    shares = any(pages for _, pages in groups) and window is None
    if graph:
        kind = backend.graph_kind(step.metadata)
        shares = shares and sum(group_sizes) >= 4
        assert shares or kind == "plain"
        backend = backend.for_graph(sum(group_sizes), kind)
    assert_attends(step, spec, backend)
    merges = [call for call in library.calls if call.name == "merge_state_in_place"]
    assert len(merges) == (kind == "cascade" if graph else shares)


def test_no_cascade_if_it_is_switched_off() -> None:
    step = share(make_step([(1, 21), (1, 19)], 4, PLAIN, torch.float32), [(2, 4)])
    library = FakeFlashInfer()
    backend = FlashInferBackend(setup_for(step, PLAIN, cascade=False), library)
    assert_attends(step, PLAIN, backend)
    assert not any(call.name == "merge_state_in_place" for call in library.calls)
    assert backend.graph_kinds(2) == ("plain",) and backend.graph_kind(step.metadata) == "plain"


def test_deterministic_attention_never_splits_the_keys_of_a_row() -> None:
    step = make_step([(1, 21), (1, 19), (7, 11)], 4, PLAIN, torch.float32)
    for asked in (True, False):
        library = FakeFlashInfer()
        backend = FlashInferBackend(setup_for(step, PLAIN, deterministic=asked), library)
        assert_attends(step, PLAIN, backend)
        plans = [call.options for call in library.calls if call.name.endswith(".plan")]
        assert [options["disable_split_kv"] for options in plans] == [asked] * 2
        made = [call.options for call in library.calls if call.name.endswith("DecodeWithPagedKVCacheWrapper")]  # fmt: skip
        assert [options["use_tensor_cores"] for options in made] == [
            asked
        ]  # of two heads a KV head


@given(
    groups=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12),
    count=st.integers(3, 8),
    cut=st.integers(0, 3),
)
def test_groups_that_save_the_most_find_room_first(
    groups: list[tuple[int, int]], count: int, cut: int
) -> None:
    pages = [pages if size > 1 else 0 for size, pages in groups]
    indptr = np.cumsum([0, *(size for size, _ in groups)], dtype=np.int32)
    num_rows = max(1, int(indptr[-1]) - cut)
    all_groups = PrefixGroups(indptr, np.array(pages, dtype=np.int32)).first(num_rows)
    limited = all_groups.at_most(count)
    assert len(limited.num_pages) == count and limited.indptr[-1] == num_rows

    def by_row(these: PrefixGroups) -> list[tuple[int, int] | None]:
        """(first row of its group, pages) of each row that shares something"""
        return [
            (int(first), int(shared)) if shared else None
            for first, size, shared in zip(
                these.indptr, these.sizes(), these.num_pages, strict=False
            )
            for _ in range(size)
        ]

    whole = [
        (int(first), shared) if shared and end <= num_rows else None
        for first, end, shared in zip(indptr[:-1], indptr[1:], pages, strict=True)
        for _ in range(min(end, num_rows) - first)
    ]
    assert by_row(all_groups) == whole
    assert all(kept in (None, before) for kept, before in zip(by_row(limited), whole, strict=True))
    if len(all_groups.num_pages) <= count:
        assert by_row(limited) == whole
    else:
        saved = sorted(((all_groups.sizes() - 1) * all_groups.num_pages).tolist())[::-1]
        kept = ((limited.sizes() - 1) * limited.num_pages).clip(min=0).sum()
        assert kept == sum(saved[: (count - 1) // 2])


LLAMA_8B = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


@pytest.mark.parametrize(
    ("sizes", "tokens", "pays"),
    [([256], [8192], True), ([2], [16], False), ([2, 2, 2], [16, 16, 32], False), ([1], [8192], False),
     ([32, 1], [2048, 0], True)],
)  # fmt: skip
def test_long_prefixes_of_many_pay_and_short_ones_of_few_do_not(
    sizes: list[int], tokens: list[int], pays: bool
) -> None:
    assert flashinfer_wrappers.cascade_pays(np.array(sizes), np.array(tokens), LLAMA_8B, 2) == pays


# ---------------------------------------------------------------- graphs


def test_a_graph_reads_what_was_planned_last() -> None:
    """Page tables change between replays, in the same buffers."""
    library = FakeFlashInfer()
    first = make_step([(1, 9), (1, 20)], 4, PLAIN, torch.float32)
    second = make_step([(1, 30), (1, 5)], 4, PLAIN, torch.float32)
    parent = FlashInferBackend(setup_for(first, PLAIN), library)
    backend: Any = parent.for_graph(2, "plain")
    for step in (first, second, first):
        assert_attends(step, PLAIN, backend)


def test_a_graph_holds_every_kind_of_layer() -> None:
    local, capped = replace(PLAIN, sliding_window=4), replace(PLAIN, soft_cap=3.0)
    step = share(make_step([(1, 21), (1, 19)], 4, PLAIN, torch.float32), [(2, 4)])
    parent = FlashInferBackend(setup_for(step, PLAIN, local, capped), FakeFlashInfer())
    sinks = torch.linspace(-1.0, 3.0, PLAIN.num_heads)
    for kind, step.sinks in itertools.product(("plain", "cascade"), (None, sinks)):
        graph = parent.for_graph(2, kind)
        graph.plan(step.metadata)
        for spec in (PLAIN, local, capped):
            caches = step.key_cache.clone(), step.value_cache.clone()
            result = graph.attend(
                AttentionInputs(step.query, step.key, step.value, caches, spec, step.sinks)
            )
            torch.testing.assert_close(result.double(), written_out(step, spec), rtol=1e-4, atol=1e-5)  # fmt: skip


def test_a_plan_waits_until_the_device_has_read_the_last() -> None:
    device = FakeDevice()
    step = make_step([(1, 9), (1, 20)], 4, PLAIN, torch.float32)
    backend = FlashInferBackend(setup_for(step, PLAIN, device=device), FakeFlashInfer())
    backend.plan(step.metadata)
    backend.plan(step.metadata)
    assert device.waits == []  # it had nothing else to do
    device.compute()
    backend.plan(step.metadata)
    assert device.waits == []
    backend.plan(step.metadata)
    assert [what for what, _ in device.waits] == ["mark"]


def test_graphs_of_all_sizes_share_their_memory() -> None:
    step = make_step([(1, 9), (1, 20)], 4, PLAIN, torch.float32)
    library = FakeFlashInfer()
    backend = FlashInferBackend(setup_for(step, PLAIN), library)
    for rows in (2, 8, 16):
        backend.for_graph(rows, "plain")
    graphs = [w.options for w in library.wrappers if w.in_graph]
    for name in ("indptr", "indices", "last_page_len"):
        assert len({options[f"paged_kv_{name}_buffer"].data_ptr() for options in graphs}) == 1


# ---------------------------------------------------------------- types and rules


def test_fp8_keys_and_values_are_rounded_and_never_overflow() -> None:
    step = make_step([(1, 9), (5, 11)], 4, PLAIN, torch.float32)
    setup = setup_for(step, PLAIN, kv_dtype=torch.float8_e4m3fn)
    caches = [cache.nan_to_num(0).to(torch.float8_e4m3fn) for cache in (step.key_cache, step.value_cache)]  # fmt: skip
    results = []
    for backend in (FlashInferBackend(setup, FakeFlashInfer()), TorchReferenceBackend()):
        backend.plan(step.metadata)
        results.append(
            backend.attend(
                AttentionInputs(
                    step.query, step.key, step.value, tuple(c.clone() for c in caches), PLAIN
                )
            )
        )
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    huge = torch.tensor([1e6, -1e6, 3.0])
    assert to_kv_dtype(huge, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 3.0]


def test_fa3_takes_long_fresh_prompts_and_fa2_short_extensions() -> None:
    assert flashinfer_wrappers.prefill_kernel(np.array([8192]), 32) == "fa3"
    assert flashinfer_wrappers.prefill_kernel(np.array([2048] * 4), 32) == "fa3"
    assert flashinfer_wrappers.prefill_kernel(np.array([256]), 32) == "fa2"
    assert flashinfer_wrappers.prefill_kernel(np.array([1, 17]), 32) == "fa2"


@pytest.fixture
def fa3_step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """One that FA3 computes, if it can; its rule has a test of its own."""
    monkeypatch.setattr(flashinfer_wrappers, "FA3_FROM_TILES", 4)
    return make_step([(1, 9), (7, 11)], 4, PLAIN, torch.float32)


def kernels_that_ran(library: FakeFlashInfer) -> set[str]:
    wrappers = [w for w in library.wrappers if isinstance(w, BatchPrefill) and w.num_launches]
    return {str(wrapper.backend) for wrapper in wrappers}


@pytest.mark.parametrize(("asked", "ran"), [("auto", "fa3"), ("fa2", "fa2"), ("fa3", "fa3")])
def test_the_kernel_for_prompts_can_be_set(fa3_step: Step, asked: Any, ran: str) -> None:
    library, step = FakeFlashInfer(), fa3_step
    backend = FlashInferBackend(setup_for(step, PLAIN, prefill_kernel=asked), library)
    assert_attends(step, PLAIN, backend)
    assert kernels_that_ran(library) == {ran}


def test_fa3_is_taken_for_short_prompts_too_where_it_is_asked_for() -> None:
    step = make_step([(3, 9)], 4, PLAIN, torch.float32)
    library = FakeFlashInfer()
    attend(FlashInferBackend(setup_for(step, PLAIN, prefill_kernel="fa3"), library), step, PLAIN)
    assert kernels_that_ran(library) == {"fa3"}


@pytest.mark.parametrize("place", ["__init__", "plan", "run"])
def test_where_fa3_fails_fa2_computes_and_one_warning_says_so(
    fa3_step: Step, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    library, step = FakeFlashInfer(fa3_fails_in=place), fa3_step
    local = replace(PLAIN, sliding_window=5)
    backend = FlashInferBackend(setup_for(step, PLAIN, local), library)
    for _ in range(2):
        for spec in (PLAIN, local):
            assert_attends(step, spec, backend)
    assert kernels_that_ran(library) == {"fa2"}
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "--prefill-kernel fa2" in record.message
    assert f"no kernel image for FA3 in {place}" in record.message


def test_fa3_that_was_asked_for_and_fails_is_an_error(fa3_step: Step) -> None:
    step = fa3_step
    setup = setup_for(step, PLAIN, prefill_kernel="fa3")
    for place in ("plan", "run"):
        with pytest.raises(RuntimeError, match="no kernel image"):
            attend(FlashInferBackend(setup, FakeFlashInfer(fa3_fails_in=place)), step, PLAIN)
    with pytest.raises(ConfigError, match="--prefill-kernel fa3 needs a Hopper"):
        FlashInferBackend(setup, FakeFlashInfer(hopper=False))
    with pytest.raises(ConfigError, match="KV cache of the activations' type"):
        FlashInferBackend(replace(setup, kv_dtype=torch.float8_e4m3fn), FakeFlashInfer())


def test_a_lack_of_memory_is_no_reason_to_leave_fa3(
    fa3_step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    step = fa3_step
    backend = FlashInferBackend(setup_for(step, PLAIN), FakeFlashInfer())
    monkeypatch.setattr(BatchPrefill, "plan", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        backend.plan(step.metadata)


def test_why_flashinfer_can_not_be_used_says_what_to_do() -> None:
    assert "NVIDIA" in str(why_not(AttentionSetup()))


def test_a_kernel_that_cannot_be_compiled_says_what_to_install() -> None:
    library: dict[str, Any] = {"__name__": "flashinfer.jit.core"}
    exec("def load(): raise RuntimeError('Could not find nvcc')", library)
    with pytest.raises(RuntimeError) as raised:
        library["load"]()
    assert "install nvcc" in str(lacks_kernels(raised.value))
    assert "Could not find nvcc" in str(lacks_kernels(raised.value))
    with pytest.raises(RuntimeError) as other:
        raise RuntimeError("shapes differ")
    assert lacks_kernels(other.value) is None


# ---------------------------------------------------------------- the real library


def test_every_call_fits_the_real_signatures() -> None:
    """The package is imported without a GPU; its kernels are not run."""
    real = pytest.importorskip("flashinfer")
    library = FakeFlashInfer()
    step = make_step([(1, 21), (1, 19), (5, 11)], 4, PLAIN, torch.float32)
    for shared in (False, True):
        backend = FlashInferBackend(setup_for(step, PLAIN), library)
        attend(backend, share(step, [(2, 4), (1, 0)]) if shared else step, PLAIN)
    decodes = share(make_step([(1, 21), (1, 19)], 4, PLAIN, torch.float32), [(2, 4)])
    for kind in ("plain", "cascade"):
        attend(backend.for_graph(2, kind), decodes, PLAIN)
    assert {call.name for call in library.calls} == {
        f"Batch{kind}WithPagedKVCacheWrapper{method}"
        for kind in ("Decode", "Prefill")
        for method in ("", ".plan", ".run", ".reset_workspace_buffer")
    } | {"append_paged_kv_cache", "merge_state_in_place"}
    for call in library.calls:
        target: Any = real
        for part in call.name.split("."):
            target = getattr(target, part)
        inspect.signature(target).bind(*call.arguments, **call.options)
    inspect.signature(real.utils.is_sm90a_supported).bind(torch.device("cpu"))


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_norms_are_the_compiled_ones_unless_the_user_wants_others(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", "the package")
    monkeypatch.setenv(
        "FLASHINFER_USE_CUDA_NORM", before or ""
    )  # so that it is as before afterwards
    if before is None:
        monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM")
    assert load_flashinfer() == "the package"
    assert os.environ["FLASHINFER_USE_CUDA_NORM"] == after
