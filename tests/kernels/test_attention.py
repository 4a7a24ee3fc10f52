"""Paged attention is its definition: for every layout of a step, head dimension, dtype and
instruction set."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import radixrt_kernels.attention
from radixrt.attention.backend import AttentionSpec
from radixrt.attention.metadata import PrefixGroups
from radixrt_kernels.attention import SCALE_BYTES, AttentionPlan
from radixrt_kernels.reference.attention import decoded, paged_attention
from tests.attention.steps import Step, indptr, make_step, step_lengths, written_out

ONE_FIXTURE_FOR_ALL_EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}
"""Values are about 1, so these are some units of the last place of each dtype."""


def reference(step: Step, spec: AttentionSpec) -> torch.Tensor:
    """After ``step.attend`` has written the new keys and values."""
    m = step.metadata
    return paged_attention(
        step.query,
        step.key_cache,
        step.value_cache,
        m.qo_indptr_cpu,
        m.kv_indptr_cpu,
        m.last_page_len_cpu,
        m.kv_indices,
        spec.scale,
        spec.sliding_window,
        spec.soft_cap,
        step.sinks,
    )


def assert_is_the_definition(step: Step, spec: AttentionSpec) -> None:
    result = step.attend(spec, "cpu")
    atol = ATOL[step.query.dtype]
    torch.testing.assert_close(result.double(), reference(step, spec), atol=atol, rtol=0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    native = radixrt_kernels.native
    if native is None:
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    before = native.num_threads()
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(before)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(step_lengths(), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 4]),
    soft_cap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_the_reference_is_the_definition_written_out(
    lengths: list[tuple[int, int]], window: int | None, soft_cap: float | None, has_sinks: bool
) -> None:
    spec = AttentionSpec(6, 2, 4, 0.3, window, soft_cap)
    step = make_step(lengths, 3, spec, torch.float32)
    step.sinks = torch.linspace(-1.0, 3.0, 6) if has_sinks else None
    step.attend(spec)  # writes the new keys and values
    expected = written_out(step, spec)
    torch.testing.assert_close(reference(step, spec), expected, atol=1e-12, rtol=0)


@ONE_FIXTURE_FOR_ALL_EXAMPLES
@given(
    lengths=st.lists(step_lengths(), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1), (9, 3)]),
    head_dim=st.sampled_from([2, 8, 18, 64]),
    window=st.sampled_from([None, 1, 4, 100]),
    soft_cap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(list(ATOL)),
)
def test_any_mix_of_prefill_and_decode_is_the_definition(
    isa: str,
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    dtype: torch.dtype,
) -> None:
    spec = AttentionSpec(*heads, head_dim, 0.3, window, soft_cap)
    assert_is_the_definition(make_step(lengths, page_size, spec, dtype), spec)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_long_sequences_of_every_head_dim_are_the_definition(
    isa: str, head_dim: int, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(6, 2, head_dim, head_dim**-0.5)
    step = make_step([(1, 700), (150, 300), (1, 64), (1, 1), (65, 65)], 16, spec, dtype)
    assert_is_the_definition(step, spec)


@pytest.mark.parametrize("window", [None, 1, 100, 513])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_keys_divided_among_threads_give_the_same(
    threads: int, page_size: int, window: int | None, soft_cap: float | None
) -> None:
    spec = AttentionSpec(4, 2, 32, 0.2, window, soft_cap)
    step = make_step([(1, 1500), (3, 1100), (20, 900)], page_size, spec, torch.float32)
    assert_is_the_definition(step, spec)


def test_more_heads_than_a_tile_has_rows_may_share_a_kv_head(isa: str) -> None:
    spec = AttentionSpec(130, 1, 16, 0.25)
    assert_is_the_definition(make_step([(1, 40), (3, 9)], 4, spec, torch.float32), spec)


# ------------------------------------------------------------ the same bits in any step


@pytest.fixture
def short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences have several cuts."""
    monkeypatch.setattr(radixrt_kernels.attention, "KEYS_PER_CUT", 64)


Run = tuple[int, int, int]
"""Sequence, first position and end position of consecutive queries."""


def part_of(whole: Step, runs: list[Run], shared: list[tuple[int, int]] | None = None) -> Step:
    """A step that computes some runs of a step of whole sequences, whose keys and values lie in the
    cache already.

    Args:
        shared: (members, pages) of each group of neighbouring runs.
    """
    m = whole.metadata
    first_rows, first_pages = m.qo_indptr_cpu.tolist(), m.kv_indptr_cpu.tolist()
    rows = rows_of(whole, runs)
    pages = [-(-end // m.page_size) for _, _, end in runs]
    tables = [
        m.kv_indices[first_pages[sequence] :][:count]
        for (sequence, _, _), count in zip(runs, pages, strict=True)
    ]
    assert all(end <= first_rows[sequence + 1] - first_rows[sequence] for sequence, _, end in runs)
    groups = None
    if shared is not None:
        members, num_pages = zip(*shared, strict=True)
        groups = PrefixGroups(
            np.cumsum([0, *members], dtype=np.int32), np.array(num_pages, np.int32)
        )
    metadata = dataclasses.replace(
        m,
        qo_indptr_cpu=indptr([end - begin for _, begin, end in runs]),
        kv_indptr_cpu=indptr(pages),
        last_page_len_cpu=torch.tensor([(end - 1) % m.page_size + 1 for _, _, end in runs]).int(),
        kv_indices=torch.cat(tables),
        kv_locations=m.kv_locations[rows],
        shared_prefixes=groups,
    )
    states = {name: getattr(whole, name)[rows] for name in ("query", "key", "value")}
    return dataclasses.replace(whole, metadata=metadata, **states)


def rows_of(whole: Step, runs: list[Run]) -> torch.Tensor:
    starts = whole.metadata.qo_indptr_cpu.tolist()
    return torch.cat([starts[sequence] + torch.arange(begin, end) for sequence, begin, end in runs])


LENGTHS = (331, 205, 64)
DIVISIONS: dict[str, list[Run]] = {
    "one decode": [(0, 330, 331)],
    "decodes": [(0, 330, 331), (1, 204, 205), (2, 63, 64), (0, 0, 1)],
    "drafts": [(0, 326, 331), (1, 203, 205), (2, 60, 64)],
    "a draft": [(0, 254, 257)],
    "chunks": [(0, 100, 260), (1, 0, 77), (2, 0, 1)],
    "a chunk behind decodes": [(1, 204, 205), (2, 63, 64), (0, 129, 331)],
    "the other sequences": [(1, 0, 205), (2, 0, 64)],
}


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "soft_cap"),
    [
        ((6, 2), 64, None, None),
        ((14, 2), 64, None, None),
        ((8, 2), 80, 100, None),
        ((4, 4), 18, None, 2.0),
        ((1, 1), 8, 7, 2.0),
    ],
)
@pytest.mark.usefixtures("short_cuts")
def test_no_bit_of_a_row_depends_on_the_rest_of_its_step(
    isa: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Prefills, chunks, drafts and decodes, alone and together, by one thread and by three."""
    native = radixrt_kernels.native
    spec = AttentionSpec(*heads, head_dim, 0.2, window, soft_cap)
    whole = make_step([(length, length) for length in LENGTHS], 5, spec, dtype)
    before = native.num_threads()
    try:
        native.set_num_threads(1)
        expected = whole.attend(spec, "cpu")
        for threads in (1, 3):
            native.set_num_threads(threads)
            assert torch.equal(whole.attend(spec, "cpu"), expected), threads
            for name, runs in DIVISIONS.items():
                result = part_of(whole, runs).attend(spec, "cpu")
                assert torch.equal(result, expected[rows_of(whole, runs)]), (name, threads)
    finally:
        native.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.usefixtures("short_cuts")
def test_no_bit_depends_on_pages_that_are_read_once(
    isa: str, threads: int, dtype: torch.dtype, window: int | None
) -> None:
    spec = AttentionSpec(6, 2, 64, 0.125, window)
    lengths = [331, 205, 150, 140, 90]
    whole = sharing(make_step([(n, n) for n in lengths], 16, spec, dtype), 4, 8)
    metadata = dataclasses.replace(whole.metadata, shared_prefixes=None)
    whole = dataclasses.replace(whole, metadata=metadata)
    whole.attend(spec, "cpu")  # writes all keys and values
    runs = [(0, 330, 331), (1, 202, 205), (2, 149, 150), (3, 139, 140), (4, 89, 90)]
    apart = part_of(whole, runs).attend(spec, "cpu")
    assert torch.equal(part_of(whole, runs, [(4, 8), (1, 0)]).attend(spec, "cpu"), apart)
    assert torch.equal(part_of(whole, runs, [(2, 8), (2, 7), (1, 0)]).attend(spec, "cpu"), apart)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.usefixtures("short_cuts")
def test_a_sink_is_one_more_score_without_a_value(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    """In every division of the keys alike; one that is far above all keys leaves nothing, one of
    minus infinity changes no bit."""
    spec = AttentionSpec(6, 2, 64, 0.125, window)
    whole = make_step([(length, length) for length in LENGTHS], 5, spec, dtype)
    plain = whole.attend(spec, "cpu")
    whole.sinks = torch.tensor([0.5, 3.0, -2.0, 300.0, -torch.inf, 6.0])
    result = whole.attend(spec, "cpu")
    expected = reference(whole, spec)
    torch.testing.assert_close(result.double(), expected, atol=ATOL[dtype], rtol=0)
    assert not result[:, 3].any() and torch.equal(result[:, 4], plain[:, 4])
    for name, runs in DIVISIONS.items():
        part = part_of(whole, runs).attend(spec, "cpu")
        assert torch.equal(part, result[rows_of(whole, runs)]), name
    over_codes = coded(whole).attend(spec, "cpu")
    error = (over_codes - result).double().square().mean().sqrt()
    assert error < 0.01 + ATOL[dtype]


# ------------------------------------------------------------ coded keys and values


def coded(step: Step) -> Step:
    """The same over an int8 cache in which nothing lies yet."""
    caches = [
        torch.full((*cache.shape[:-1], cache.shape[-1] + SCALE_BYTES), -1, dtype=torch.int8)
        for cache in (step.key_cache, step.value_cache)
    ]
    return dataclasses.replace(step, key_cache=caches[0], value_cache=caches[1])


CODED_SHAPES = [
    ((6, 2), 64, None, None),
    ((14, 2), 64, None, None),
    ((14, 2), 24, 100, None),
    ((8, 8), 80, None, 2.0),
    ((9, 1), 130, None, 2.0),
]
"""With more than four heads to a KV head, some instruction sets multiply codes without decoding
them."""


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "window", "soft_cap"), CODED_SHAPES)
@pytest.mark.usefixtures("short_cuts")
def test_coded_keys_and_values(
    isa: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Attention over them is its definition, and near that over the keys and values themselves,
    also where one feature is large. No bit of a row depends on its step."""
    spec = AttentionSpec(*heads, head_dim, head_dim**-0.5, window, soft_cap)
    plain = make_step([(length, length) for length in LENGTHS], 5, spec, dtype)
    plain.key[..., 3] *= 20
    plain.query[..., 3] /= 20
    whole = coded(plain)
    result = whole.attend(spec, "cpu")
    heads_read = dataclasses.replace(
        whole,
        key_cache=decoded(whole.key_cache, rotated=True),
        value_cache=decoded(whole.value_cache, rotated=False),
    )
    expected = reference(heads_read, spec)
    atol = 2 * ATOL[dtype]  # rotated queries are rounded too
    torch.testing.assert_close(result.double(), expected, atol=atol, rtol=0)
    error = (result - plain.attend(spec, "cpu")).double().square().mean().sqrt()
    assert error < 0.01 + ATOL[dtype]
    for name in ("decodes", "drafts", "a chunk behind decodes"):
        part = part_of(whole, DIVISIONS[name]).attend(spec, "cpu")
        assert torch.equal(part, result[rows_of(whole, DIVISIONS[name])]), name


def test_heads_of_zeros_and_of_infinities_in_a_coded_cache(isa: str) -> None:
    spec = AttentionSpec(2, 1, 16, 0.25)
    step = coded(make_step([(3, 3), (1, 1)], 4, spec, torch.float32))
    step.key[:3], step.value[:3] = 0, 0
    step.value[3, 0, 5] = torch.inf
    result = step.attend(spec, "cpu")
    assert torch.equal(result[:3], torch.zeros(3, 2, 16))
    assert result[3].isnan().all()


def test_a_coded_cache_of_another_width_is_refused(isa: str) -> None:
    spec = AttentionSpec(2, 1, 16, 0.25)
    step = make_step([(3, 3)], 4, spec, torch.float32)
    with pytest.raises(ValueError, match="int8 with two bytes for each scale"):
        dataclasses.replace(step, key_cache=step.key_cache.char(), value_cache=step.value_cache.char()).attend(spec, "cpu")  # fmt: skip
    mixed = dataclasses.replace(coded(step), value_cache=step.value_cache)
    with pytest.raises(ValueError, match="int8 with two bytes for each scale"):
        mixed.attend(spec, "cpu")


def test_another_cut_changes_bits(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """So the tests above would see cuts that depend on the step."""
    spec = AttentionSpec(6, 2, 64, 0.125)
    step = make_step([(1, 900), (1, 500)], 16, spec, torch.float32)
    expected = step.attend(spec, "cpu")
    monkeypatch.setattr(radixrt_kernels.attention, "KEYS_PER_CUT", 128)
    assert not torch.equal(step.attend(spec, "cpu"), expected)
    monkeypatch.setattr(radixrt_kernels.attention, "KEYS_PER_CUT", 100)
    with pytest.raises(ValueError, match="multiple of 64"):
        step.attend(spec, "cpu")


# ------------------------------------------------------------ shared prefixes


def sharing(step: Step, members: int, num_pages: int) -> Step:
    """The first ``members`` sequences get the first sequence's first pages, and what lies in
    them."""
    m = step.metadata
    pages = m.kv_indices.clone()
    starts = m.kv_indptr_cpu.tolist()
    for start in starts[:members]:
        pages[start : start + num_pages] = m.kv_indices[:num_pages]
    count = len(starts) - 1
    groups = PrefixGroups(
        np.array([0, *range(members, count + 1)], np.int32),
        np.array([num_pages] + [0] * (count - members), np.int32),
    )
    metadata = dataclasses.replace(m, kv_indices=pages, shared_prefixes=groups)
    return dataclasses.replace(step, metadata=metadata)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("window", [None, 30, 130])
@pytest.mark.usefixtures("short_cuts")
def test_pages_that_sequences_share_are_the_same_as_pages_of_their_own(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    spec = AttentionSpec(6, 2, 64, 0.125, window)
    lengths = [(1, 200), (1, 130), (5, 160), (1, 129), (1, 50), (4, 4)]
    assert_is_the_definition(sharing(make_step(lengths, 16, spec, dtype), 4, 8), spec)


@pytest.mark.usefixtures("short_cuts")
def test_many_members_of_a_group_are_the_definition(threads: int) -> None:
    spec = AttentionSpec(14, 2, 16, 0.25)
    step = make_step([(1, 300 + i) for i in range(25)], 4, spec, torch.float32)
    assert_is_the_definition(sharing(step, 25, 70), spec)


def test_a_page_that_is_said_to_be_shared_is_read_once() -> None:
    """Members whose own copies differ from the first one's would show it; the plan refuses to be
    lied to."""
    spec = AttentionSpec(2, 1, 8, 0.3)
    step = make_step([(1, 64), (1, 64)], 16, spec, torch.float32)
    groups = PrefixGroups(np.array([0, 2], np.int32), np.array([3], np.int32))
    lie = dataclasses.replace(
        step, metadata=dataclasses.replace(step.metadata, shared_prefixes=groups)
    )
    with pytest.raises(ValueError, match="begin with the same"):
        lie.attend(spec, "cpu")
    too_far = sharing(step, 2, 3)
    groups = PrefixGroups(np.array([0, 2], np.int32), np.array([4], np.int32))
    metadata = dataclasses.replace(
        too_far.metadata,
        kv_indices=too_far.metadata.kv_indices[[0, 1, 2, 3, 0, 1, 2, 3]],
        shared_prefixes=groups,
    )
    with pytest.raises(ValueError, match="before every query"):
        dataclasses.replace(too_far, metadata=metadata).attend(spec, "cpu")


# ------------------------------------------------------------ layouts and refusals


def test_views_of_one_projection_are_taken_as_they_lie(isa: str) -> None:
    spec = AttentionSpec(6, 2, 16, 0.25)
    step = make_step([(1, 30), (9, 40)], 16, spec, torch.bfloat16)
    merged = torch.cat([t.flatten(1) for t in (step.query, step.key, step.value)], dim=1)
    query, key, value = (
        part.unflatten(1, (-1, 16)) for part in merged.split([6 * 16, 2 * 16, 2 * 16], dim=1)
    )
    assert not query.is_contiguous()
    view = dataclasses.replace(step, query=query, key=key, value=value)
    assert_is_the_definition(view, spec)


def plan(**changes: object) -> AttentionPlan:
    """Two sequences, of one and of two queries, on pages of four."""
    arguments: dict[str, object] = {
        "qo_indptr": indptr([1, 2]),
        "kv_indptr": indptr([2, 1]),
        "last_page_len": torch.tensor([1, 3]).int(),
        "kv_indices": torch.tensor([0, 1, 2]).int(),
        "kv_slots": torch.tensor([4, 9, 10]),
        "page_size": 4,
        **changes,
    }
    return AttentionPlan(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": indptr([1, 2]).long()}, "qo_indptr must be int32"),
        ({"qo_indptr": torch.tensor([0, 2, 1]).int()}, "qo_indptr must ascend"),
        ({"qo_indptr": indptr([1, 4]), "kv_slots": torch.arange(5)}, "no more queries than keys"),
        ({"kv_indptr": indptr([2, 2])}, "kv_indptr must ascend"),
        ({"kv_indptr": indptr([3, 0])}, "must have a page"),
        ({"last_page_len": torch.tensor([1, 5]).int()}, "last_page_len must be in"),
        ({"kv_indices": torch.tensor([0, -1, 2]).int()}, "kv_indices must not be negative"),
        ({"kv_slots": torch.tensor([4, 9])}, "kv_slots must have as many"),
        ({"kv_slots": torch.tensor([4, -9, 10])}, "kv_slots must not be negative"),
        ({"page_size": 0}, "page_size"),
        ({"shared_prefixes": (indptr([1]), torch.tensor([0]).int())}, "group_indptr must ascend"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(
    isa: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("query", torch.zeros(4, 4, 8), "query must be .num_tokens"),
        ("query", torch.zeros(3, 3, 8), "multiple of key's heads"),
        ("query", torch.zeros(3, 8, 4).transpose(1, 2), "without gaps"),
        ("key", torch.zeros(3, 2, 6), "key and value must be"),
        ("value", torch.zeros(3, 1, 8), "key and value must be"),
        ("value", torch.zeros(3, 2, 8).half(), "key and value must be"),
        ("key_cache", torch.zeros(2, 4, 2, 8), "with every planned page"),
        ("value_cache", torch.zeros(3, 5, 2, 8), "the caches must be"),
        ("key_cache", torch.zeros(3, 4, 2, 8).bfloat16(), "the caches must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(
    isa: str, name: str, tensor: torch.Tensor, message: str
) -> None:
    tensors = {
        "query": torch.zeros(3, 4, 8),
        "key": torch.ones(3, 2, 8),
        "value": torch.ones(3, 2, 8),
        "key_cache": torch.zeros(3, 4, 2, 8),
        "value_cache": torch.zeros(3, 4, 2, 8),
    }
    plan().attend(**{key: value.clone() for key, value in tensors.items()}, scale=1.0)
    with pytest.raises(ValueError, match=message):
        plan().attend(**{**tensors, name: tensor}, scale=1.0)
    assert not tensors["key_cache"].any() and not tensors["value_cache"].any()


def test_dtypes_without_a_kernel_are_refused(isa: str) -> None:
    states, cache = torch.zeros(3, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2, 8).char()
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        plan().attend(states, states, states, cache, cache, scale=1.0)
