"""AMX's tiles, real or emulated: sums in the manual's order, in whatever thread, and only where
they are right."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import groupwise, linear
from radixrt_kernels.isa import choose
from tests.kernels.conftest import ISAS
from tests.kernels.test_groupwise import random_matrix

WITH_TILES = [isa for isa in ISAS if isa.startswith("amx")]

tiles = pytest.mark.parametrize(
    "isa",
    WITH_TILES or [pytest.param("", marks=pytest.mark.skip("neither AMX nor its emulation"))],
    indirect=True,
)


def sums_as_in_the_manual(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Per 32 columns even and odd products apart, then both, then all so far: [tokens, columns],
    [rows, columns] -> [tokens, rows]

    A product of two bfloat16 has 16 bits, so float32 holds it and a sum rounds once, as a fused
    multiply-add does.
    """
    sums = torch.zeros(hidden.shape[0], weight.shape[0])
    for begin in range(0, hidden.shape[1], 32):
        of_parity = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for column in range(begin, min(begin + 32, hidden.shape[1])):
            product = hidden[:, column, None].float() * weight[None, :, column].float()
            of_parity[column % 2] += product
        sums += of_parity[0] + of_parity[1]
    return sums


@tiles
@pytest.mark.parametrize("tokens", [1, 40])
def test_sums_are_bit_for_bit_what_the_manual_says(isa: str, tokens: int) -> None:
    """The bias takes the upper bits of the sums away, so that bfloat16 shows the lower ones."""
    hidden, weight = torch.randn(tokens, 71).bfloat16(), torch.randn(83, 71).bfloat16()
    expected, packed = sums_as_in_the_manual(hidden, weight), linear.pack(weight)
    for token in range(tokens):
        bias = -expected[token].bfloat16()
        result = linear.linear(hidden, packed, 83, bias)[token]
        assert torch.equal(result, (expected[token] + bias.float()).bfloat16())


@tiles
def test_every_thread_shapes_its_own_tiles(isa: str) -> None:
    """Whatever the pool's size, and also in a caller beside the pool; kinds take turns in one
    thread."""
    native = radixrt_kernels.native
    assert native is not None
    hidden, weight = torch.randn(70, 200).bfloat16(), torch.randn(1000, 200).bfloat16()
    packed, codes = linear.pack(weight), random_matrix(1000, 200, 4, 64)

    def products(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return linear.linear(hidden, packed, 1000), groupwise.linear(hidden, codes)

    before = native.num_threads()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            with ThreadPoolExecutor(3) as callers:
                results += callers.map(products, range(6))
    finally:
        native.set_num_threads(before)
    native.use_isa("avx512_bf16")
    exact = (hidden.double() @ weight.double().T).bfloat16()
    torch.testing.assert_close(
        results[0][0], exact, rtol=8e-3, atol=8e-3 * float(exact.abs().max())
    )
    assert torch.equal(results[0][1], groupwise.linear(hidden, codes))
    for plain, quantized in results:
        assert torch.equal(plain, results[0][0])
        assert torch.equal(quantized, results[0][1])


def test_every_instruction_set_computes_the_same_exact_products(isa: str) -> None:
    """With which AMX is tried before it is used."""
    native = radixrt_kernels.native
    assert native is not None
    assert native.same_products(isa, "baseline")


class Machine(ModuleType):
    """What ``choose`` sees of the compiled module."""

    def __init__(self, isa: str, right: bool = True) -> None:
        super().__init__("machine")
        self.in_use, self.right = isa, right

    def isa(self) -> str:
        return self.in_use

    def use_isa(self, name: str) -> None:
        self.in_use = name

    def same_products(self, one: str, other: str) -> bool:
        return self.right


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("isa", "name", "other"),
    [("amx", "AMX", "avx512_bf16"), ("avx2_vnni", "AVX-VNNI", "avx2")],
)
def test_an_instruction_set_with_wrong_products_is_not_used_and_said(
    isa: str, name: str, other: str, named: bool
) -> None:
    machine = Machine(isa, right=False)
    with pytest.warns(RuntimeWarning, match=f"{name} computes wrong products"):
        choose(machine, isa if named else None)
    assert machine.in_use == other


@pytest.mark.parametrize(
    ("best", "wanted", "used"),
    [
        ("amx", None, "amx"),
        ("amx", "avx2", "avx2"),
        ("avx512", None, "avx512"),
        ("avx2_vnni", None, "avx2_vnni"),
    ],
)
def test_without_a_fault_nothing_is_said(best: str, wanted: str | None, used: str) -> None:
    machine = Machine(best)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(machine, wanted)
    assert machine.in_use == used


def test_stand_ins_are_never_the_default() -> None:
    assert not {"amx_emulated", "avx2_vnni_evex"} & set(ISAS[-1:])
