"""The worker on a GPU: overlapping steps, graphs, cascades and memory, through the real
scheduler."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
import torch

from radixrt.attention import flashinfer
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.backends import llguidance
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.device.device import CPU, CudaDevice
from radixrt.messages.steps import SlotLogprobs
from tests.checkpoints import END_OF_TURN, VOCAB_SIZE, make_checkpoint, make_tokenizer
from tests.engine.in_process import InProcessEngine
from tests.engine.test_grammars import SCHEMA, answers, text_of

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that FlashInfer has kernels for."""
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), head_dim=64, hidden_size=256,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    return make_tokenizer(folder)


def on_gpu(model_dir: Path, device: CudaDevice, **settings: object) -> InProcessEngine:
    return InProcessEngine(
        model_dir, device=device, **{"dtype": "bfloat16", "attention_backend": "flashinfer", **settings}
    )  # fmt: skip


def on_cpu(model_dir: Path, dtype: str) -> InProcessEngine:
    return InProcessEngine(
        model_dir, device=CPU, dtype=dtype, attention_backend="torch_reference",
        disable_radix_cache=True,
    )  # fmt: skip


def random_prompts(shared: int = 0) -> list[list[int]]:
    """Six prompts of several lengths, of which ``shared`` tokens at the beginning are the same."""
    rng = random.Random(3)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(shared)]
    return [
        [*beginning, *(rng.randrange(3, VOCAB_SIZE) for _ in range(length))]
        for length in (1, 7, 20, 33, 64, 130)
    ]


def values(rows: list[SlotLogprobs]) -> torch.Tensor:
    """The log-probability of each token itself."""
    return torch.tensor([row.logprobs[0] for row in rows])


def prompt_values(engine: InProcessEngine, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the prompts' tokens but the first, all prompts one after the other."""
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    return torch.cat([values(rows) for rows in engine.prompt_logprobs if rows])


def assert_as_close_as_a_cpu(
    result: torch.Tensor, model_dir: Path, prompts: list[list[int]], first: list[int]
) -> None:
    """The error against float32 is that of bfloat16 on a CPU, give or take.

    Args:
        result: log-probabilities of the tokens of each prompt from its ``first`` on.
    """
    exact, rounded = (prompt_values(on_cpu(model_dir, d), prompts) for d in ("float32", "bfloat16"))
    kept = torch.cat(
        [torch.arange(1, len(p)) >= start for p, start in zip(prompts, first, strict=True)]
    )
    own = (rounded[kept] - exact[kept]).abs().mean()
    assert (result - exact[kept]).abs().mean() < 2 * own + 1e-3


def test_prompts_have_the_logprobs_of_a_cpu(model_dir: Path, device: CudaDevice) -> None:
    prompts = random_prompts()
    engine = on_gpu(model_dir, device, disable_radix_cache=True, chunked_prefill_size=48)
    assert_as_close_as_a_cpu(prompt_values(engine, prompts), model_dir, prompts, [1] * len(prompts))


@pytest.mark.parametrize("shared", [0, 96])
@pytest.mark.parametrize("settings", [{}, {"debug_disable_cuda_graph": True}, {"page_size": 1}])
def test_answers_have_the_logprobs_of_a_prompt_that_holds_them(
    model_dir: Path,
    device: CudaDevice,
    shared: int,
    settings: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode steps, in graphs and not, with and without a cascade, against one prefill on a CPU."""
    monkeypatch.setattr(flashinfer, "cascade_pays", lambda *arguments: shared > 0)
    prompts = random_prompts(shared)
    engine = on_gpu(model_dir, device, **settings)
    asked = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    given = engine.generate(prompts, asked)
    result = torch.cat([values(rows) for rows in engine.logprobs])
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, given, strict=True)]
    assert_as_close_as_a_cpu(result, model_dir, whole, [len(prompt) for prompt in prompts])


def test_seeds_give_the_same_answer_in_any_slot(model_dir: Path, device: CudaDevice) -> None:
    """One sequence in a crowd of others; equal but for ties that rounding decides."""
    asked = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    prompt, *others = random_prompts()
    alone = on_gpu(model_dir, device).generate([prompt] * 1, asked)[0]
    crowd = on_gpu(model_dir, device).generate([*others, prompt], asked)[-1]
    assert crowd[:8] == alone[:8]


def test_constrained_answers_satisfy_their_schema(model_dir: Path, device: CudaDevice) -> None:
    facts = TokenizerFacts.load(
        model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=(END_OF_TURN,)
    )
    grammar = llguidance.compile_json_schema(json.dumps(SCHEMA), facts, "compact")
    engine = on_gpu(model_dir, device)
    for answer in answers(engine, grammar):
        jsonschema.validate(json.loads(text_of(facts, answer)), SCHEMA)
    assert engine.scheduler.state.counters.forced_tokens > 0


def test_a_lone_long_prompt_is_computed_in_chunks_that_sample_nothing(
    model_dir: Path, device: CudaDevice
) -> None:
    """The first step of a fresh scheduler has 64 tokens of it, so no row of this step samples."""
    rng = random.Random(5)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]
    engine = on_gpu(model_dir, device)
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (answer,) = engine.generate([prompt], asked)
    assert len(answer) == 8 and engine.scheduler.state.counters.steps > 8
    whole = on_gpu(model_dir, device, max_step_ms=0)
    assert len(whole.generate([prompt], asked)[0]) == 8


@pytest.mark.parametrize("architecture", ["gemma4", "qwen3_moe"])
def test_other_models_take_a_step_that_samples_nothing(
    architecture: str, tmp_path: Path, device: CudaDevice
) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    engine = InProcessEngine(folder, device=device, dtype="bfloat16", chunked_prefill_size=64)
    asked = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(engine.generate([list(range(3, 303))], asked)[0]) == 4


def test_a_steady_decode_step_never_synchronizes(model_dir: Path, device: CudaDevice) -> None:
    """torch raises where it would wait for the device; waiting for a step's tokens is an event, and
    allowed."""
    engine = on_gpu(model_dir, device)
    asked = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=200, ignore_eos=True)
    engine.generate(random_prompts(), asked)  # kernels are loaded
    engine.begin(random_prompts(), asked)
    for _ in range(10):
        engine.advance()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            assert engine.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.scheduler.num_running == 6


def test_the_pool_gets_the_share_that_was_asked_for(model_dir: Path, device: CudaDevice) -> None:
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    engine = on_gpu(model_dir, device, max_total_tokens=None, mem_fraction_static=0.3)
    free, _ = torch.cuda.mem_get_info()
    assert engine.info.kv_pool_tokens > 4096
    assert total - free <= 0.35 * total


def test_what_does_not_fit_is_refused_in_words(model_dir: Path, device: CudaDevice) -> None:
    with pytest.raises(ConfigError, match="mem-fraction-static"):
        on_gpu(model_dir, device, max_total_tokens=1 << 32)
