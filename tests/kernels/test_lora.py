"""Adapters of linear layers are added as the reference adds them, and each row has the bits that it
has alone."""

import pytest
import torch

from radixrt_kernels import lora
from radixrt_kernels.reference import lora as reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""And what one rounding of an output changes."""

WIDTHS = [(16,), (20, 7, 33), (64, 16, 16)]
RANK, ADAPTERS = 32, 5
COLUMNS = 34


class Layer:
    """Random adapters of a layer, as they are and packed."""

    def __init__(self, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        parts = len(widths)
        self.dtype, self.widths = dtype, torch.tensor(widths, dtype=torch.int32)
        self.down = torch.randn(ADAPTERS, parts, RANK, COLUMNS).to(dtype)
        self.ups = [torch.randn(ADAPTERS, width, RANK).to(dtype) for width in widths]
        self.ranks = torch.full((ADAPTERS, parts), RANK, dtype=torch.int32)
        for adapter, part, rank in ((0, 0, 5), (1, parts - 1, 0), (3, 0, 0)):
            self.ranks[adapter, part] = rank
            self.down[adapter, part, rank:] = 0
            self.ups[part][adapter, :, rank:] = 0
        self.pad(RANK)

    def pad(self, rank: int) -> None:
        """Pack the adapters for a rank."""
        self.rank, zeros = rank, rank - RANK
        down = torch.nn.functional.pad(self.down, (0, 0, 0, zeros))
        ups = [torch.nn.functional.pad(up, (0, zeros)) for up in self.ups]
        self.packed_down = torch.stack([lora.pack_down(one.flatten(0, 1)) for one in down])
        each = ([up[adapter] for up in ups] for adapter in range(ADAPTERS))
        self.packed_up = torch.stack([lora.pack_up(one) for one in each])

    def add(
        self, hidden: torch.Tensor, adapters: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        output = output.clone()
        groups = lora.group_rows(adapters, ADAPTERS)
        lora.add_lora_(
            hidden,
            groups,
            self.packed_down,
            self.packed_up,
            self.rank,
            self.ranks,
            self.widths,
            output,
        )
        return output

    def expected(
        self, hidden: torch.Tensor, adapters: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        return reference.add_lora_of_parts(hidden, adapters, self.down, self.ups, output)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("count", [1, 3, 40, 300])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_many_adapters(
    isa: str, dtype: torch.dtype, widths: tuple[int, ...], count: int
) -> None:
    layer = Layer(widths, dtype)
    hidden = torch.randn(count, COLUMNS).to(dtype)
    output = torch.randn(count, sum(widths)).to(dtype)
    adapters = torch.randint(0, ADAPTERS + 1, (count,))
    added = layer.add(hidden, adapters, output)
    expected = layer.expected(hidden, adapters, output)
    tolerance = TOLERANCES[dtype] * float(expected.abs().max())
    torch.testing.assert_close(added, expected, atol=tolerance, rtol=TOLERANCES[dtype])
    for row in range(0, count, 7):
        one = slice(row, row + 1)
        alone = layer.add(hidden[one], adapters[one], output[one])
        assert torch.equal(alone[0], added[row]), "the bits depend on the batch"


def test_what_an_adapter_does_not_change_keeps_its_bits(isa: str) -> None:
    """Also zeros with a sign, which a sum with 0 would lose."""
    layer = Layer((16, 16), torch.float32)
    hidden, output = torch.randn(3, COLUMNS), torch.full((3, 32), -0.0)
    added = layer.add(hidden, torch.tensor([ADAPTERS, 1, 3]), output)
    untouched = torch.cat((added[0], added[1, 16:], added[2, :16]))
    assert untouched.signbit().all() and (untouched == 0).all()
    assert (added[1, :16] != 0).all() and (added[2, 16:] != 0).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_zeros_behind_a_rank_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    layer = Layer((20, 33), dtype)
    hidden, output = torch.randn(9, COLUMNS).to(dtype), torch.randn(9, 53).to(dtype)
    adapters = torch.arange(9) % (ADAPTERS + 1)
    narrow = layer.add(hidden, adapters, output)
    layer.pad(2 * RANK)
    assert torch.equal(layer.add(hidden, adapters, output), narrow)


def test_wrong_shapes_are_refused(isa: str) -> None:
    layer = Layer((16,), torch.float32)
    hidden, output = torch.randn(2, COLUMNS), torch.randn(2, 16)
    for wrong_hidden, wrong_output in (
        (hidden[:, 1:], output),
        (hidden, output[:1]),
        (hidden.bfloat16(), output),
    ):
        with pytest.raises((ValueError, TypeError)):
            layer.add(wrong_hidden, torch.tensor([0, 1]), wrong_output)
