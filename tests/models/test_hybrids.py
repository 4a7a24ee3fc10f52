"""Models with recurrent layers give transformers' logits, the same bits whatever the chunks and the
batch, and go on from a kept state as if they had computed it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import radixrt_kernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.checkpoints import HYBRIDS
from tests.models.harness import Harness, Sequence, check_chunks_and_batches
from tests.models.test_against_transformers import random_tokens

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

TOLERANCE = 1e-5
MAMBA2_TOLERANCE = 2e-5
"""Its logits reach 6, and those of transformers are up to 1.1e-5 from its own with weights in
float64: on some processors the two float32 results differ by 1.4e-5."""
LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 129, 300]
PROMPT = random_tokens(80, seed=80)


@pytest.fixture(scope="module", params=HYBRIDS)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_model(folder, kernels=NativeKernels())


@torch.inference_mode()
def test_logits_of_short_and_long_prompts_equal_transformers(folder: Path, model: CausalLM) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    harness = Harness(model, page_size=16)
    tolerance = MAMBA2_TOLERANCE if type(model).__name__.startswith("Mamba2") else TOLERANCE
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        expected = theirs(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(
            harness.logits(tokens), expected, atol=tolerance, rtol=0, check_stride=False
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_batches_change_no_bit(folder: Path, dtype: str) -> None:
    harness = Harness(load_model(folder, dtype=dtype, kernels=NativeKernels()), page_size=4)
    check_chunks_and_batches(harness, PROMPT)


def test_a_sequence_goes_on_from_a_kept_state_with_the_same_bits(model: CausalLM) -> None:
    """The first sequence keeps its state at some positions; others begin there, on its pages."""
    harness = Harness(model, page_size=1, num_rows=6)
    expected = harness.logits(PROMPT)
    first = Sequence(keep={1: 0, 17: 1, 40: 2})
    harness.free_rows = [3, 4, 5]
    harness.step([(first, PROMPT[:17])])
    harness.step([(first, PROMPT[17:50])])
    for position, row in ((1, 0), (17, 1), (40, 2)):
        resumed = Sequence(first.pages[:position], position, harness.free_rows[-1])
        harness.states.copy([(row, harness.free_rows[-1])])
        found = harness.step([(resumed, PROMPT[position:])])[0]
        assert torch.equal(found, expected[position:])


def test_the_state_decides_the_logits(model: CausalLM) -> None:
    """Otherwise these tests would pass with a wrong state."""
    harness, sequence = Harness(model, page_size=16), Sequence()
    expected = harness.logits(PROMPT)
    harness.step([(sequence, PROMPT[:60])])
    assert sequence.row is not None
    harness.states.copy([(-1, sequence.row)])
    found = harness.step([(sequence, PROMPT[60:])])[0]
    assert (found[0] - expected[60]).abs().max() > 0.1


def test_a_state_of_a_later_token_gives_other_logits(model: CausalLM) -> None:
    harness = Harness(model, page_size=1, num_rows=6)
    harness.free_rows = [4, 5]
    first = Sequence(keep={41: 2})
    expected = harness.step([(first, PROMPT)])[0]
    resumed = Sequence(first.pages[:40], 40, row=2)
    assert not torch.equal(harness.step([(resumed, PROMPT[40:])])[0], expected[40:])
