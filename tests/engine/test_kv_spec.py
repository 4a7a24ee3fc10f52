"""Models with unequal keys and values, one latent a layer, or each layer's own: the same tokens as
without a cache. ``make determinism`` tries each with every size of pages and chunks."""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from radixrt.attention.backend import AttentionSetup, AttentionSpec
from radixrt.attention.kv_spec import CachedTensor, KVSpec
from radixrt.attention.registry import make_backend
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.device.device import CpuDevice
from radixrt.models import registry
from radixrt.models.loader import load_model
from radixrt.worker.kv import pool
from radixrt.worker.kv.pool import KVPool, bytes_per_token, pool_pages
from tests.engine.in_process import GREEDY, InProcessEngine
from tests.engine.kv_spec_models import HEAD_DIMS, greedy_tokens, save_config
from tests.engine.test_against_transformers import make_prompts

ANSWER = msgspec.structs.replace(GREEDY, max_tokens=24)
LATENT, UNEQUAL = [(1, 32)], [(2, 24), (2, 12)]
LAYERS = {
    "LatentForCausalLM": [LATENT] * 3,
    "UnequalForCausalLM": [UNEQUAL] * 3,
    "MixedForCausalLM": [LATENT, [(2, 8), (2, 8)], [(2, 8), (2, 12)]],
}
"""By architecture and layer: the shape of each tensor for one token."""

Model = tuple[Path, list[list[int]]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HEAD_DIMS:
        place = f"tests.engine.kv_spec_models:{name}"
        monkeypatch.setitem(registry.ARCHITECTURES, name, place)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """``model(architecture)``: a folder, and the answers to ``make_prompts()`` without a cache."""
    made: dict[str, Model] = {}

    def get(architecture: str) -> Model:
        if architecture not in made:
            folder = save_config(architecture, tmp_path_factory.mktemp(architecture))
            loaded = load_model(folder, load_format="dummy", seed=ServerConfig().random_seed)
            with torch.inference_mode():
                answers = [greedy_tokens(loaded, prompt, 24) for prompt in make_prompts()]
            made[architecture] = (folder, answers)
        return made[architecture]

    return get


def engine_of(folder: Path, **settings: object) -> InProcessEngine:
    return InProcessEngine(folder, load_format="dummy", **settings)  # type: ignore[arg-type]


SIZES = [(1, 7), (16, 64), (3, 512)]
"""Of pages and chunks."""
EACH_WITH_ONE = [(name, *sizes) for name, sizes in zip(LAYERS, SIZES, strict=True)]
EACH_WITH_EVERY = [(name, *sizes) for name in LAYERS for sizes in SIZES]


@pytest.mark.parametrize(
    ("architecture", "page_size", "chunk"),
    EACH_WITH_EVERY if "RADIXRT_DETERMINISM" in os.environ else EACH_WITH_ONE,
)
def test_tokens_equal_those_without_a_cache(
    architecture: str, page_size: int, chunk: int, model: Callable[[str], Model]
) -> None:
    folder, expected = model(architecture)
    prompts = make_prompts()
    engine = engine_of(folder, page_size=page_size, chunked_prefill_size=chunk)
    assert engine.generate(prompts, ANSWER) == expected, "cold"
    assert engine.generate(prompts, ANSWER) == expected, "warm"
    assert engine.cached == [(len(p) - 1) // page_size * page_size for p in prompts]
    one_by_one = engine_of(folder, page_size=page_size, max_running_requests=1)
    assert one_by_one.generate(prompts, ANSWER) == expected, "alone"


@pytest.mark.parametrize("architecture", LAYERS)
def test_tokens_are_the_same_under_eviction_and_where_steps_overlap(
    architecture: str, model: Callable[[str], Model]
) -> None:
    folder, expected = model(architecture)
    engine = engine_of(folder, page_size=4, max_total_tokens=128, device=CpuDevice(overlaps=True))
    for _ in range(3):
        assert engine.generate(make_prompts(), ANSWER) == expected
    assert engine.scheduler.state.kv.evicted_pages > 0


@pytest.mark.parametrize(("kv_cache_dtype", "size"), [("auto", 4), ("fp8_e4m3", 1)])
@pytest.mark.parametrize("architecture", LAYERS)
def test_pool_and_accounting_follow_the_model(
    architecture: str, kv_cache_dtype: str, size: int, model: Callable[[str], Model]
) -> None:
    engine = engine_of(model(architecture)[0], page_size=8, kv_cache_dtype=kv_cache_dtype)
    kept = [[tuple(tensor.shape[2:]) for tensor in layer] for layer in engine.runner.kv_caches]
    assert kept == LAYERS[architecture]
    numbers = sum(math.prod(shape) for layer in kept for shape in layer)
    assert engine.info.kv_bytes_per_token == numbers * size
    pages = 4096 // 8 + 1  # and the spare one
    num_bytes = sum(t.numel() * t.itemsize for layer in engine.runner.kv_caches for t in layer)  # fmt: skip
    assert num_bytes == pages * 8 * engine.info.kv_bytes_per_token
    prompts = make_prompts()
    assert engine.generate(prompts, ANSWER) == engine.generate(prompts, ANSWER)


@pytest.mark.parametrize(
    ("architecture", "kept"),
    [
        ("gemma4", [[(2, 24)] * 2, [(1, 40)] * 2] * 2),
        ("gemma4_e", [*[[(2, 24)] * 2] * 2, [(2, 40)] * 2, [(2, 24)] * 2, [], []]),
    ],
)
def test_layers_have_sizes_of_their_own_and_those_that_share_kv_no_pages(
    architecture: str, kept: list[list[tuple[int, int]]], checkpoint: Callable[[str], Path]
) -> None:
    engine = InProcessEngine(checkpoint(architecture), page_size=8)
    caches = engine.runner.kv_caches
    assert [[tuple(tensor.shape[2:]) for tensor in layer] for layer in caches] == kept
    numbers = sum(math.prod(shape) for layer in kept for shape in layer)
    assert engine.info.kv_bytes_per_token == 4 * numbers
    assert engine.info.attention_backend == "cpu"


def test_kernels_of_plain_keys_and_values_refuse_and_name_what_to_use(
    model: Callable[[str], Model], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = model("UnequalForCausalLM")
    refusal = r"a layer of this model keeps 2 tensors.*torch_reference"
    with pytest.raises(ConfigError, match=refusal):
        engine_of(folder, attention_backend="cpu")
    with caplog.at_level(logging.WARNING):
        assert engine_of(folder).info.attention_backend == "torch_reference"
    assert "PyTorch computes attention" in caplog.text


def test_eight_bit_keys_and_values_with_scales_have_a_place_in_the_pool() -> None:
    codes, scale = CachedTensor((8, 64), torch.int8), CachedTensor((8,), torch.float32)
    kv_specs = [KVSpec((codes, codes, scale, scale))] * 2
    setup = AttentionSetup([AttentionSpec(8, 8, 64, 0.125)] * 2, kv_specs=kv_specs, page_size=4)
    assert bytes_per_token(setup) == 2 * (2 * 8 * 64 + 2 * 8 * 4)
    (layer, _) = KVPool(setup, num_pages=3).kv_caches
    assert [tuple(t.shape) for t in layer] == [(4, 4, 8, 64), (4, 4, 8, 64), (4, 4, 8), (4, 4, 8)]
    with pytest.raises(ConfigError, match="No attention backend reads a KV cache of 4 tensors"):
        make_backend("torch_reference", setup)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_memory_holds_nearly_twice_the_tokens_in_int8(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_available_bytes", lambda device, share, asked_for: 4 << 30)

    def pages(dtype: torch.dtype) -> int:
        specs = [KVSpec.keys_and_values(2, head_dim, dtype)] * 24
        setup = AttentionSetup([AttentionSpec(14, 2, head_dim, 0.125)] * 24, kv_specs=specs)
        return pool_pages(setup, mem_fraction=1, max_total_tokens=None, max_useful_tokens=1 << 40)

    assert 1.9 <= pages(torch.int8) / pages(torch.bfloat16) < 2


def test_on_a_cpu_a_larger_pool_than_the_default_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(pool, "available_memory", lambda: 100 * gib)
    specs = [KVSpec.keys_and_values(8, 128, torch.bfloat16)] * 32
    setup = AttentionSetup([AttentionSpec(32, 8, 128, 0.1)] * 32, kv_specs=specs)

    def gib_of_pool(asked: int | None) -> float:
        tokens = None if asked is None else asked * gib // bytes_per_token(setup)
        pages = pool_pages(setup, mem_fraction=0.85, max_total_tokens=tokens, max_useful_tokens=1 << 40)  # fmt: skip
        return pages * setup.page_size * bytes_per_token(setup) / gib

    assert gib_of_pool(None) == pytest.approx(6.8, abs=0.01)
    assert gib_of_pool(80) == pytest.approx(80, abs=0.01)
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        gib_of_pool(90)


@pytest.mark.parametrize(
    "kept",
    [
        KVSpec((CachedTensor((1, 24), torch.float32), CachedTensor((2, 8), torch.float32))),
        KVSpec((CachedTensor((1, 24), torch.float32),)),
        KVSpec.keys_and_values(1, 32, torch.int8),
    ],
    ids=["other heads", "other width", "integers"],
)
def test_a_cache_that_is_not_what_the_attention_reads_is_refused(kept: KVSpec) -> None:
    setup = AttentionSetup([AttentionSpec(4, 1, 32, 0.2)], kv_specs=[kept])
    with pytest.raises(ConfigError, match="No attention backend reads"):
        make_backend("torch_reference", setup)
