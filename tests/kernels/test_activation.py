"""Gated activations and the soft cap are what torch computes, for every size and instruction
set."""

import pytest
import torch

from radixrt_kernels import activation
from radixrt_kernels.reference.activation import gated_activation

NAMES = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_what_torch_computes(isa: str, name: str, dtype: torch.dtype) -> None:
    for tokens, size in [(0, 4), (1, 1), (1, 15), (3, 16), (2, 17), (7, 100), (300, 129)]:
        gate_up = 4 * torch.randn(tokens, 2 * size).to(dtype)
        expected = gated_activation(gate_up, name)
        result = activation.gated_activation(gate_up, name)
        torch.testing.assert_close(result, expected, rtol=TOLERANCES[dtype], atol=1e-5)


def test_extremes_stay_what_they_are(isa: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -89.0, 0.0, 89.0, 1e30, torch.inf, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    expected = gated_activation(gate_up, "silu")
    torch.testing.assert_close(
        activation.gated_activation(gate_up, "silu"),
        expected,
        equal_nan=True,
        rtol=1e-5,
        atol=1e-35,
    )


def test_half_precision_rounds_as_torch_does(isa: str) -> None:
    """gelu of a large number is that number, so gelu(64) / 64 * x is a conversion there and
    back."""
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = bits.view(dtype)
        gate_up = torch.stack((torch.full_like(values, 32), values), dim=1)
        expected = (values.float() * 32).to(dtype)
        result = activation.gated_activation(gate_up, "gelu").squeeze(1)
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_sigmoid_gates_each_value_or_a_whole_head(isa: str, dtype: torch.dtype) -> None:
    for tokens, heads, size in [(0, 2, 4), (1, 1, 1), (3, 2, 16), (2, 3, 37), (40, 4, 129)]:
        values, gate = (4 * torch.randn(tokens, heads, 2, size).to(dtype)).unbind(2)
        for one in (gate, gate[..., :1].contiguous()):
            expected = values * torch.sigmoid(one)
            result = activation.sigmoid_gate(one, values)
            torch.testing.assert_close(result, expected, rtol=TOLERANCES[dtype], atol=1e-5)
        alone = activation.sigmoid_gate(gate)
        torch.testing.assert_close(
            alone, torch.sigmoid(gate), rtol=TOLERANCES[dtype], atol=1e-6, check_stride=False
        )


def test_rows_of_a_wider_matrix_are_taken_as_they_lie(isa: str) -> None:
    wide = torch.randn(9, 100)
    out = torch.full((9, 50), 7.0)
    activation.gated_activation(wide[:, 3:23], "silu", out[:, 20:30])
    expected = torch.full((9, 50), 7.0)
    expected[:, 20:30] = gated_activation(wide[:, 3:23], "silu")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("gate_up", "out", "message"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 2), "even number of columns.*float32\\[2, 5\\]"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 2), "num_tokens, 2 \\* size"),
        (torch.zeros(4, 4).T[:3], torch.zeros(3, 2), "without gaps"),
        (torch.zeros(2, 4), torch.zeros(3, 2), "output must be"),
        (torch.zeros(2, 4), torch.zeros(2, 2).half(), "output must be"),
        (torch.zeros(2, 4, device="meta"), torch.zeros(2, 2), "CPU"),
    ],
)
def test_what_does_not_fit_is_refused(
    isa: str, gate_up: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        activation.gated_activation(gate_up, "silu", out)


def test_dtypes_without_a_kernel_are_refused(isa: str) -> None:
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        activation.gated_activation(torch.zeros(2, 4, dtype=torch.int32), "silu")
    with pytest.raises(TypeError, match="dtype"):
        activation.gated_activation(torch.zeros(2, 4, dtype=torch.float64), "silu")


def test_the_soft_cap_is_what_torch_computes_and_the_same_at_any_place(isa: str) -> None:
    for rows, vocab in [(1, 1), (3, 17), (5, 200)]:
        logits = 20 * torch.randn(rows, vocab + 3)
        expected = 7 * torch.tanh(logits.double() / 7)
        alone = [activation.soft_cap_(row.clone(), 7.0) for row in logits.split(1)]
        columns = logits.t().clone(memory_format=torch.contiguous_format)
        columns = activation.soft_cap_(columns, 7.0).t()
        result = activation.soft_cap_(logits[:, :vocab], 7.0)
        torch.testing.assert_close(result.double(), expected[:, :vocab], atol=2e-6, rtol=0)
        assert torch.equal(result, columns[:, :vocab])
        assert all(torch.equal(one[0, :vocab], row) for one, row in zip(alone, result, strict=True))
    extremes = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 1e30]])
    expected = torch.tensor([[2.0, -2.0, torch.nan, 0.0, 2.0]])
    torch.testing.assert_close(activation.soft_cap_(extremes, 2.0), expected, equal_nan=True)
    for wrong in (torch.zeros(3), torch.zeros(2, 3).half(), torch.zeros(3, 2).t()):
        with pytest.raises(ValueError, match=r"logits must be \[rows, vocab\]"):
            activation.soft_cap_(wrong, 2.0)
    with pytest.raises(ValueError, match="positive"):
        activation.soft_cap_(torch.zeros(2, 3), 0.0)
