"""Arrays uploaded together arrive unchanged, and the fake device detects wrong use."""

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from radixrt.device.device import ALIGNMENT, CpuDevice, make_device, pack, unpack
from tests.fake_device import FakeDevice

any_array = st.sampled_from([np.int32, np.int64, np.float32, np.bool_, np.uint8]).flatmap(
    lambda dtype: arrays(dtype, st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple))
)


@given(st.lists(any_array, max_size=5))
def test_packed_arrays_come_out_as_they_were_and_aligned(given_arrays: list[np.ndarray]) -> None:
    def buffer(size: int) -> torch.Tensor:
        return torch.full((size,), 0xAB, dtype=torch.uint8)

    packed = pack(given_arrays, buffer)
    for array, tensor in zip(given_arrays, unpack(packed, given_arrays), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        if array.size:
            assert (tensor.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0


def test_a_download_is_not_changed_by_what_comes_after() -> None:
    device = CpuDevice()
    (tensor,) = device.upload(np.arange(3))
    download = device.download([tensor])
    tensor.zero_()
    assert download.is_ready() and download.wait()[0].tolist() == [0, 1, 2]


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    assert make_device(torch.device("cuda")).torch_device == torch.device("cuda", 3)
    assert make_device(torch.device("cuda", 1)).torch_device == torch.device("cuda", 1)
    assert [device.index for device in chosen] == [3, 1], "torch refuses a device without one"


class GraphLikeTorchs:
    """Its memory ends with the last graph in it, after which torch refuses to capture into it."""

    graphs_in: ClassVar[Counter[object]] = Counter()
    ended: ClassVar[set[object]] = set()

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool not in self.ended, "use_count > 0 INTERNAL ASSERT FAILED"
        self._pool = pool
        self.graphs_in[pool] += 1

    def __del__(self) -> None:
        self.graphs_in[self._pool] -= 1
        if not self.graphs_in[self._pool]:
            self.ended.add(self._pool)

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...

    def pool(self) -> object:
        return self._pool


def test_graphs_share_memory_while_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(10))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphLikeTorchs)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: stream)
    device = make_device(torch.device("cuda", 0))
    first = [device.capture(lambda: "made") for _ in range(3)]
    assert GraphLikeTorchs.graphs_in == {0: 3}
    del first
    second = [device.capture(lambda: "made") for _ in range(2)]
    assert GraphLikeTorchs.graphs_in == {0: 0, 1: 2}
    assert second[0][1] == "made"


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: bool((t > 0).any()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.cpu(),
        lambda t: (t * 2).to("cpu"),
        lambda t: t.numpy(),
    ],
)
def test_the_fake_device_notices_when_the_host_looks(look) -> None:
    device = FakeDevice()
    (tensor,) = device.upload(np.arange(3))
    FakeDevice.reads.clear()
    tensor.add(1)[1:].index_select(0, device.upload(np.array([0]))[0])
    assert FakeDevice.reads == []
    look(tensor)
    assert FakeDevice.reads


def test_the_fake_device_is_done_with_what_was_waited_for() -> None:
    device = FakeDevice()
    first = device.record_event()
    assert first.is_past()
    device.compute()
    download = device.download([])
    behind = device.record_event()
    device.compute()
    last = device.record_event()
    assert not download.is_ready()
    download.wait()
    assert download.is_ready() and behind.is_past() and not last.is_past()
    assert device.waits == [("download", 1)]
