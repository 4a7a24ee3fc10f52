"""Hidden states of the wanted rows alone are those of a step for all rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixrt.attention.backend import ForwardContext
from radixrt.attention.cpu import CpuBackend
from radixrt.attention.setup import AttentionSetup
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.checkpoints import CONFIGS
from tests.models.harness import Harness, Sequence


class EveryWay:
    """A model that computes each step for all rows, for some, and for none."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        assert rows is None, "the harness wants all"
        every = self._model.forward(token_ids, positions, context)
        for rows in (torch.tensor([1, 4, len(every) - 1]), torch.tensor([], dtype=torch.int64)):
            wanted = self._model.forward(token_ids, positions, context, rows)
            assert torch.equal(wanted, every[rows])
        return every


@pytest.mark.parametrize("architecture", CONFIGS)
def test_wanted_rows_are_those_of_all_rows(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    model = load_model(checkpoint(architecture), kernels=NativeKernels())
    setup = AttentionSetup(specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype)
    harness = Harness(EveryWay(model), page_size=4, backend=CpuBackend(setup))  # type: ignore[arg-type]
    harness.step([(Sequence(), [5, 17, 200]), (Sequence(), [150, 8, 31, 12, 90])])
