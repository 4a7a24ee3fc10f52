"""The trial step is the largest possible one, and the error names the settings if it does not
fit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.attention import flashinfer_wrappers
from radixrt.attention.backend import AttentionSetup
from radixrt.attention.bidirectional import BidirectionalAttention
from radixrt.attention.flashinfer import FlashInferBackend
from radixrt.attention.flashinfer_wrappers import SharedBuffers
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.constrained.bitmask import bitmask_words
from radixrt.device.device import CPU
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.ids import num_ids
from radixrt.worker import build, trial_run
from radixrt.worker.runner import ModelRunner
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.state import SamplingBatch
from radixrt.worker.trial_run import largest_step, num_pages
from tests.attention.fake_flashinfer import BatchPrefill, FakeFlashInfer
from tests.checkpoints import make_pooled
from tests.fake_device import FakeDevice


@pytest.mark.parametrize(
    ("slots", "budget", "page_size"), [(4, 100, 16), (256, 8192, 16), (7, 7, 1), (3, 50, 5)]
)
def test_the_trial_step_spends_every_limit(slots: int, budget: int, page_size: int) -> None:
    config = ServerConfig(
        max_running_requests=slots, max_prefill_tokens=budget, page_size=page_size
    )
    plan = largest_step(config, slots, context_length=4096)
    assert len({admit.slot for admit in plan.admit}) == slots  # every slot samples
    assert sum(chunk.num_tokens for chunk in plan.prefill) >= budget + slots  # beside the decodes
    pages = [page for admit in plan.admit for page in memoryview(admit.pages).cast("i")]
    assert sorted(pages) == list(range(num_pages(plan)))
    for admit, chunk in zip(plan.admit, plan.prefill, strict=True):
        # room for the decode step that follows
        assert num_ids(admit.pages) * page_size > chunk.num_tokens == num_ids(admit.token_ids)


def test_sequences_of_a_trial_are_within_the_context() -> None:
    config = ServerConfig(max_running_requests=2, max_prefill_tokens=8192, page_size=16)
    plan = largest_step(config, 2, context_length=64)
    assert all(chunk.num_tokens < 64 for chunk in plan.prefill)


def runner_after_trial(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Built as on a GPU, where the largest step is tried first."""
    monkeypatch.setattr(build, "is_gpu", lambda device: True)
    config = ServerConfig(
        model_path=str(model_dir),
        max_total_tokens=64,
        max_running_requests=3,
        max_prefill_tokens=40,
    )
    return build.build_runner(config, CPU, TensorParallel(), model_dir / "tokenizer.json", print)[0]


def test_the_trial_is_a_prefill_a_decode_step_and_a_chunk_that_ends_no_prompt(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    step = ModelRunner.step

    def watched(runner: ModelRunner, plan, waited_s: float = 0.0):
        results = step(runner, plan, waited_s)
        steps.extend(num_ids(result.token_ids) for result in results)
        return results

    monkeypatch.setattr(ModelRunner, "step", watched)
    runner_after_trial(checkpoint("llama"), monkeypatch)
    assert steps == [3, 3, 0]


def test_the_trial_needs_both_prefill_kernels_of_every_kind_of_layer(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper the largest step has FA3, and a short prompt FA2. A module is compiled or loaded
    when it is needed first."""
    library = FakeFlashInfer(hopper=True)
    monkeypatch.setattr(build, "resolve_backend", lambda *arguments: "flashinfer")
    monkeypatch.setattr(build, "make_backend", lambda name, setup: FlashInferBackend(setup, library))  # fmt: skip
    monkeypatch.setattr(flashinfer_wrappers, "FA3_FROM_TILES", 12)  # 3 prompts of 4 heads
    runner = runner_after_trial(checkpoint("gemma3"), monkeypatch)
    kinds = set(runner._model.attention_specs())
    assert len(kinds) == 2, "with a window, and without"
    planned = [wrapper for wrapper in library.wrappers if wrapper.planned]
    assert Counter(w.backend for w in planned if isinstance(w, BatchPrefill)) == {"fa3": 2, "fa2": 2}  # fmt: skip


def test_a_gpus_trial_of_an_encoder_has_the_most_tokens_that_a_step_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[list[int]] = []
    plan_prompts = BidirectionalAttention.plan_prompts

    def watched(attention: BidirectionalAttention, of_each: list[int], *rest: Any) -> None:
        lengths.append(of_each)
        plan_prompts(attention, of_each, *rest)

    monkeypatch.setattr(BidirectionalAttention, "plan_prompts", watched)
    monkeypatch.setattr(build, "is_gpu", lambda device: True)
    config = ServerConfig(model_path=str(make_pooled("bert", tmp_path)), max_prefill_tokens=200, context_length=64)  # fmt: skip
    build.build_encoder(config, CPU)
    assert lengths == [[64, 63, 63]]


def test_the_page_tables_of_graphs_are_there_before_the_pool_is_sized(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SharedBuffers] = []
    make, size = SharedBuffers.__init__, build.pool_pages
    before: list[int] = []

    def watched(buffers: SharedBuffers, setup: AttentionSetup, library: Any) -> None:
        make(buffers, setup, library)
        made.append(buffers)

    def sized(*arguments: Any, **options: Any) -> int:
        before.append(len(made[0]._tables))
        return size(*arguments, **options)

    monkeypatch.setattr(SharedBuffers, "__init__", watched)
    monkeypatch.setattr(build, "pool_pages", sized)
    monkeypatch.setattr(build, "resolve_backend", lambda *arguments: "flashinfer")
    monkeypatch.setattr(build, "make_backend", lambda name, setup: FlashInferBackend(setup, FakeFlashInfer()))  # fmt: skip
    config = ServerConfig(model_path=str(checkpoint("llama")), max_total_tokens=256, max_running_requests=4)  # fmt: skip
    model_dir = Path(config.model_path)
    build.build_runner(config, FakeDevice(), TensorParallel(), model_dir / "tokenizer.json", print)
    (buffers,) = made
    assert before == [len(buffers._tables)] and set(buffers._tables) == {"decode", "own", "shared"}


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1000, 256), (300_000, 256), (700_000, 640), (1 << 30, 1024)]
)
def test_a_gpu_runs_as_many_requests_as_its_pool_has_tokens_for(tokens: int, rows: int) -> None:
    assert build.running_requests(tokens) == rows


def test_the_number_of_running_requests_follows_the_pool_of_a_gpu_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def running(**settings: Any) -> int:
        config = ServerConfig(model_path=str(checkpoint("llama")), max_prefill_tokens=8, **{"max_total_tokens": 64} | settings)  # fmt: skip
        model_dir = Path(config.model_path)
        runner, info = build.build_runner(
            config, CPU, TensorParallel(), model_dir / "tokenizer.json", print
        )
        assert len(runner._batch.computed) == info.max_running_requests
        return info.max_running_requests

    monkeypatch.setattr(build, "pool_tokens", lambda *arguments: 10**7)
    assert running() == 256
    monkeypatch.setattr(build, "is_gpu", lambda device: True)
    monkeypatch.setattr(build, "try_largest_step", lambda *arguments: None)
    assert running() == 256, "64 tokens were asked for"
    assert running(max_total_tokens=400 * 1024) == 384
    assert running(max_running_requests=3) == 3


def test_int8_kv_is_refused_on_a_gpu_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "is_gpu", lambda device: True)
    config = ServerConfig(model_path="no such folder", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is for CPUs"):
        build.build_runner(config, CPU, TensorParallel(), Path("none"), print)


def test_a_gpu_says_that_it_does_not_speculate(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner_after_trial(checkpoint("llama"), monkeypatch)
    assert "Speculation is off" in caplog.text
    caplog.clear()
    build._check_and_say(ServerConfig(speculation="off"), CPU)
    assert not caplog.text


def test_the_trial_calls_every_kernel_that_a_request_may_ask_for(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel at its first call, which is not to happen while requests are
    served."""
    drawn: list[tuple[SamplingBatch, TokenMask | None]] = []
    draw = trial_run.fastest_draw(CPU.torch_device)

    def watched(batch: SamplingBatch, logits, positions, mask):
        drawn.append((batch, mask))
        return draw(batch, logits, positions, mask)

    monkeypatch.setattr(trial_run, "fastest_draw", lambda device: watched)
    runner = runner_after_trial(checkpoint("llama"), monkeypatch)
    ((batch, mask),) = drawn
    assert batch.penalised is not None and batch.biases is not None and batch.logprobs is not None
    assert mask is not None and mask.bits.shape == (1, bitmask_words(runner._model.vocab_size))


def test_a_step_that_does_not_fit_names_the_settings(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "step", no_memory)
    with pytest.raises(ConfigError, match="--max-prefill-tokens 40 and --max-running-requests 3"):
        runner_after_trial(checkpoint("llama"), monkeypatch)


def test_weights_that_do_not_fit_are_refused_in_words(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build, "load_model", no_memory)
    with pytest.raises(ConfigError, match=r"weights do not fit.*--tp"):
        runner_after_trial(checkpoint("llama"), monkeypatch)
