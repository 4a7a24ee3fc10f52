"""Decode steps as graphs: the sizes that are captured, and padding that touches no sequence's
pages."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.attention.backend import AttentionSetup
from radixrt.attention.kv_spec import KVSpec
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.base.errors import ConfigError
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.kv.ragged import RaggedStep
from radixrt.worker.replays import DecodeGraphs, ladder
from tests.fake_device import FakeDevice

EIGHT_FEATURES = KVSpec.keys_and_values(1, 8, torch.float32)


@pytest.mark.parametrize("largest", [1, 3, 16, 100, 256, 300, 1024])
def test_the_ladder_reaches_its_end_and_wastes_little(largest: int) -> None:
    rungs = ladder(largest)
    assert rungs == sorted(set(rungs)) and rungs[-1] == largest
    for rows in range(1, largest + 1):
        rung = next(rung for rung in rungs if rung >= rows)
        assert rung < 2 * rows and rung - rows < max(8, rows / 8)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    more=st.integers(0, 5),
)
def test_padding_is_one_token_on_the_spare_page_and_changes_no_other_row(
    lengths: list[int], page_size: int, more: int
) -> None:
    pages, spare = -(-max(lengths) // page_size), 1000
    tables = np.arange(len(lengths) * pages, dtype=np.int32).reshape(len(lengths), pages)
    slots, starts = np.arange(len(lengths)), np.array(lengths) - 1
    step = RaggedStep.for_slots(tables, page_size, slots, np.ones_like(slots), starts)
    padded = step.padded(len(lengths) + more, spare)
    rows = len(lengths)
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        first, end = padded.kv_indptr[row], padded.kv_indptr[row + 1]
        np.testing.assert_array_equal(padded.kv_indices[first:end], tables[row, :used])
        assert padded.last_page_len[row] == (length - 1) % page_size + 1
        assert padded.positions[row] == length - 1
        page = tables[row, (length - 1) // page_size]
        assert padded.kv_locations[row] == page * page_size + (length - 1) % page_size
    np.testing.assert_array_equal(padded.qo_indptr, np.arange(rows + more + 1))
    assert (padded.kv_indices[padded.kv_indptr[rows] :] == spare).all()
    assert (np.diff(padded.kv_indptr)[rows:] == 1).all()
    assert (padded.last_page_len[rows:] == 1).all()
    assert (padded.kv_locations[rows:] == spare * page_size).all()


def test_the_spare_page_is_none_that_is_handed_out() -> None:
    pool = KVPool(AttentionSetup(kv_specs=[EIGHT_FEATURES] * 2), 5)
    assert pool.num_pages == 5 and pool.spare_page == 5
    assert [len(cache) for pair in pool.kv_caches for cache in pair] == [6, 6, 6, 6]


def test_what_cannot_be_captured_says_how_to_start_without() -> None:
    class Backend(TorchReferenceBackend):
        def graph_kinds(self, rows: int) -> tuple[str, ...]:
            return ("plain",)

        def for_graph(self, rows: int, kind: str) -> TorchReferenceBackend:
            return self

    class Model:
        def forward(self, *arguments: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    pool = KVPool(AttentionSetup(kv_specs=[EIGHT_FEATURES]), 5)
    graphs = DecodeGraphs(Model(), Backend(), pool, [1, 2], FakeDevice())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--debug-disable-cuda-graph.*not permitted"):
        graphs.capture()
