"""The trial step is the largest possible one, and the error names the settings if it does not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    ("slots", "budget", "page_size"), [(4, 100, 16), (256, 8192, 16), (7, 7, 1), (3, 50, 5)]
)
def test_the_trial_step_spends_every_limit(slots: int, budget: int, page_size: int) -> None:
    config = ServerConfig(
        max_running_requests=slots, max_prefill_tokens=budget, page_size=page_size
    )
    plan = largest_step(config, context_length=4096)
    assert len({admit.slot for admit in plan.admit}) == slots  # every slot samples
    assert sum(chunk.num_tokens for chunk in plan.prefill) >= budget + slots  # beside the decodes
    pages = [page for admit in plan.admit for page in memoryview(admit.pages).cast("i")]
    assert sorted(pages) == list(range(num_pages(plan)))
    for admit, chunk in zip(plan.admit, plan.prefill, strict=True):
        # room for the decode step that follows
        assert num_ids(admit.pages) * page_size > chunk.num_tokens == num_ids(admit.token_ids)


def test_sequences_of_a_trial_are_within_the_context() -> None:
    config = ServerConfig(max_running_requests=2, max_prefill_tokens=8192, page_size=16)
    plan = largest_step(config, context_length=64)
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


def test_the_trial_is_a_prefill_and_a_decode_step(
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
    assert steps == [3, 3]


def test_the_trial_calls_every_kernel_that_a_request_may_ask_for(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel at its first call, which is not to happen while requests are served."""
    drawn: list[tuple[SamplingBatch, TokenMask | None]] = []
    draw = trial_run.fastest_draw(CPU.torch_device)

    def watched(batch: SamplingBatch, counts, logits, positions, mask, device):
        drawn.append((batch, mask))
        return draw(batch, counts, logits, positions, mask, device)

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
