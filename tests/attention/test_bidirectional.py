"""Attention of encoders on a GPU: no layer waits for the device."""

import torch

from radixrt.attention.backend import AttentionInputs, AttentionSpec
from radixrt.attention.bidirectional import BidirectionalAttention
from tests.fake_device import FakeDevice, OnDevice

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=8**-0.5)


def test_prompts_of_unequal_lengths_are_attended_without_a_look_at_the_device() -> None:
    lengths = [5, 4, 9]  # two of them are padded to one length
    torch.manual_seed(0)
    states = [torch.randn(sum(lengths), heads, 8) for heads in (2, 1, 1)]
    attention = BidirectionalAttention()
    attention.plan_prompts(lengths, torch.device("cpu"))
    FakeDevice.reads.clear()
    on_device = [part.as_subclass(OnDevice) for part in states]
    output = attention.attend(AttentionInputs(*on_device, (), SPEC))
    assert FakeDevice.reads == []
    for query, key, value, found in zip(*(part.split(lengths) for part in (*states, output)), strict=True):  # fmt: skip
        scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * SPEC.scale
        expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), value[:, 0])
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
