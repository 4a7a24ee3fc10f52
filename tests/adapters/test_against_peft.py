"""The logits of a model with an adapter are those of peft, of every kind of adapter."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.adapters import ModelAdapters
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from radixrt.worker.replays import with_adapters
from tests.adapters.peft_adapters import KINDS, USUAL, config_of, make_adapter
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.harness import Harness, with_forward

FAMILIES = ["llama_biased_tied", "qwen3", "gemma2", "phi3"]
CASES = [(family, kind) for family in FAMILIES for kind in USUAL]
CASES += [("llama_biased_tied", kind) for kind in KINDS if kind not in USUAL]
WITH_EVERYTHING = [
    "mixtral", "gpt_oss", "glm4_moe", "gemma4_moe", "deepseek_v3", "qwen3_5", "granite_hybrid", "nemotron_h",
]  # fmt: skip
"""Families with experts, latents, recurrent layers or layers of their own."""
if "RADIXRT_ADAPTERS" in os.environ:
    WITH_EVERYTHING += [
        "qwen3_moe", "minimax_m2", "gemma4_e", "deepseek_v2", "lfm2_moe", "qwen3_next", "falcon_h1", "mamba2",
    ]  # fmt: skip
RANDOM = random.Random(1)
PROMPT = [RANDOM.randrange(3, VOCAB_SIZE) for _ in range(40)]

Models = Callable[[str], CausalLM]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of families, with weights of a usual size: large ones would enlarge the rounding
    errors of float32, which are bounded here."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = make_checkpoint(family, folder, initializer_range=0.06)
        return made[family]

    return get


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path]) -> Models:
    """Models of families, with native kernels."""
    loaded: dict[str, CausalLM] = {}

    def get(family: str) -> CausalLM:
        if family not in loaded:
            loaded[family] = load_model(checkpoint(family), kernels=NativeKernels())
        return loaded[family]

    return get


def logits(model: CausalLM, adapters: ModelAdapters, place: int) -> torch.Tensor:
    """Logits of the prompt, all of whose tokens have the adapter of a place."""

    def forward(ids: torch.Tensor, positions: torch.Tensor, context: Any, rows: Any) -> Any:
        places = torch.full_like(ids, place)
        return with_adapters(model, context, adapters.rows, ids, positions, places)

    return Harness(with_forward(model, forward), 16).logits(PROMPT)


def without_adapters(model: CausalLM) -> None:
    for module in model.modules():
        for name in ("lora", "key_lora", "value_lora"):
            if hasattr(module, name):
                setattr(module, name, None)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_peft(
    family: str, kind: str, checkpoint: Callable[[str], Path], models: Models, tmp_path: Path
) -> None:
    theirs = make_adapter(checkpoint(family), tmp_path, config_of(kind, family))
    check(models(family), theirs, tmp_path)


@pytest.mark.parametrize("family", WITH_EVERYTHING)
def test_every_layer_of_other_families(
    family: str, checkpoint: Callable[[str], Path], models: Models, tmp_path: Path
) -> None:
    """Experts, routers, latents and recurrent layers have adapters too."""
    theirs = make_adapter(checkpoint(family), tmp_path, None)
    check(models(family), theirs, tmp_path)


def check(model: CausalLM, theirs: Any, folder: Path) -> None:
    """Compare a model with the adapter of a folder with peft's."""
    without_adapters(model)
    adapters = ModelAdapters(model, num_adapters=3, max_rank=32)
    base = Harness(model, 16).logits(PROMPT)
    adapters.put(1, adapters.read(folder))
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        unmerged = theirs(ids).logits[0]
        merged = theirs.merge_and_unload()(ids).logits[0]
    ours = logits(model, adapters, 1)
    assert (ours - unmerged).abs().max() < 1e-5
    assert (ours - merged).abs().max() < 1e-4
    assert (ours.argmax(-1) != base.argmax(-1)).any(), "the adapter changes nothing"
    assert torch.equal(logits(model, adapters, 3), base), "rows without an adapter are the base's"
    assert torch.equal(logits(model, adapters, 0), base), "an empty place is no adapter"
