"""The stub of the CUDA runtime fails where a driver would. Needs cc and CUDA's headers."""

import ctypes
import shutil

import pytest

from bench.gpu.host.__main__ import compile_stub, cuda_headers

pytestmark = pytest.mark.skipif(
    not list(cuda_headers()) or shutil.which("cc") is None,
    reason="there are no CUDA headers, or no C compiler",
)
INVALID_VALUE, INVALID_CONFIGURATION = 1, 9
"""cudaError_t, as NVIDIA numbers them."""


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_stub(tmp_path_factory.mktemp("stub"))))


def launched(stub: ctypes.CDLL, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> int:
    nothing = ctypes.c_void_p()
    return stub.cudaLaunchKernel(
        ctypes.c_void_p(1), Dim3(*grid), Dim3(*block), nothing, ctypes.c_size_t(shared), nothing
    )


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error"),
    [
        ((1, 1, 1), (32, 4, 1), 232448, 0),
        ((0, 1, 1), (32, 4, 1), 0, INVALID_CONFIGURATION),  # no rows
        ((1, 1, 1), (0, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 65536, 1), (32, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 1, 1), (32, 33, 1), 0, INVALID_CONFIGURATION),
        ((1, 1, 1), (32, 1, 1), 232449, INVALID_VALUE),
    ],
)
def test_a_launch_that_a_gpu_refuses_fails(
    stub: ctypes.CDLL, grid: tuple[int, ...], block: tuple[int, ...], shared: int, error: int
) -> None:
    stub.radixrt_stub_reset()
    assert launched(stub, grid, block, shared) == error
    assert stub.radixrt_stub_count(0) == (error == 0)
    assert stub.cudaPeekAtLastError() == error
    assert stub.cudaGetLastError() == error
    assert stub.cudaGetLastError() == 0


def test_tritons_launches_and_copies_fail_likewise(stub: ctypes.CDLL) -> None:
    function, none = ctypes.c_void_p(1), ctypes.c_void_p()
    launch = lambda rows: stub.cuLaunchKernel(function, rows, 1, 1, 128, 1, 1, 0, none, none, none)  # noqa: E731
    assert launch(3) == 0 and launch(0) == INVALID_VALUE
    there = ctypes.create_string_buffer(8)
    copy = lambda to, count: stub.cudaMemcpy(to, there, ctypes.c_size_t(count), 0)  # noqa: E731
    assert copy(ctypes.create_string_buffer(8), 8) == 0 and copy(none, 0) == 0
    assert copy(none, 8) == INVALID_VALUE
    stub.cudaGetLastError()
