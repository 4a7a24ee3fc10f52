"""The FlashInfer backend on a GPU, against the reference: any mix of prompts and decodes."""

from dataclasses import replace

import pytest
import torch

from radixrt.attention.backend import AttentionSpec
from radixrt.attention.registry import make_backend
from radixrt.attention.setup import AttentionSetup
from radixrt.device import make_device
from tests.gpu.on_device import LLAMA, assert_attends, carried_kernels, make_steps

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

STEPS = {
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 400)],
    "a prompt": [(300, 300)],
    "a short extension of a long prefix": [(20, 2000)],
    "everything": [(1, 90), (64, 64), (1, 5), (17, 500), (1, 1), (200, 200)],
}
SPECS = {
    "plain": LLAMA,
    "one query a key": replace(LLAMA, num_heads=2),
    "window": replace(LLAMA, sliding_window=50),
    "soft cap": replace(LLAMA, soft_cap=20.0),
    "small heads": AttentionSpec(8, 2, 64, 64**-0.5),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("lengths", STEPS)
def test_the_backend_attends_as_the_reference(lengths: str, spec: str, page_size: int) -> None:
    layer = SPECS[spec]
    step, expected = make_steps(STEPS[lengths], page_size, layer)
    setup = AttentionSetup(
        [layer],
        torch.bfloat16,
        torch.bfloat16,
        page_size,
        max_rows=16,
        max_pages=4096 // page_size,
        device=make_device(torch.device("cuda")),
    )
    with carried_kernels():
        backend = make_backend("flashinfer", setup)
        backend.plan(step.metadata)
        output = backend.attend(
            step.query, step.key, step.value, step.key_cache, step.value_cache, layer
        )
        assert_attends(output, expected)
