"""The counts of the experts' tokens are those of transformers' routers, and add up to what was
computed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.calls import StatsCall
from radixrt.messages.steps import ExpertTokens
from radixrt.scheduler.process import expert_load
from tests.engine.in_process import InProcessEngine

ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(5 * i * i + 7 * j + 3) % 380 + 3 for i in range(20 + 9 * j)] for j in range(3)]


def counts_of(engine: InProcessEngine) -> NDArray[np.int64]:
    tokens = engine.runner.expert_tokens()
    return np.frombuffer(tokens.counts, dtype=np.int64).reshape(tokens.layers, -1)


def expected_counts(folder: Path, texts: list[list[int]], wanted: list[int]) -> NDArray[np.int64]:
    """By transformers' routers: of all tokens but an answer's last, which is not computed. Behind
    the last attention, only the rows that a token is wanted for are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers, count = 2, model.config.num_experts  # the second of three layers has no experts
    counts = np.zeros((layers, count), dtype=np.int64)
    for text, first in zip(texts, wanted, strict=True):
        with torch.inference_mode():
            outputs = model(torch.tensor([text[:-1]]), output_router_logits=True)
        for layer, logits in enumerate(outputs.router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok).indices
            chosen = chosen[first:] if layer == layers - 1 else chosen
            counts[layer] += np.bincount(chosen.flatten().numpy(), minlength=count)
    return counts


@pytest.mark.parametrize("chunk", [2048, 7])
def test_every_computed_token_is_counted_once_by_the_experts_that_it_goes_to(
    checkpoint: Callable[..., Path], chunk: int
) -> None:
    folder = checkpoint("qwen3_moe")
    assert InProcessEngine(folder).runner.expert_tokens() is None  # unless it is asked for
    engine = InProcessEngine(folder, expert_metrics=True, chunked_prefill_size=chunk)
    assert not counts_of(engine).any()
    answers = engine.generate(PROMPTS, ANSWER)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    expected = expected_counts(folder, texts, [len(prompt) - 1 for prompt in PROMPTS])
    assert (counts_of(engine) == expected).all()
    before = counts_of(engine)
    engine.generate(PROMPTS[:1], ANSWER)  # the cached part is not computed again
    assert (counts_of(engine) - before)[0].sum() < 2 * (len(texts[0]) - 1)


def test_the_load_of_experts_is_bounded_by_layers_and_experts() -> None:
    counts = np.array([[6, 2, 0], [1, 1, 1]], dtype=np.int64)
    load = expert_load(ExpertTokens(layers=2, counts=counts.tobytes()))
    assert load["expert_tokens"] == {"0": 7, "1": 3, "2": 1}
    assert load["expert_imbalance"] == {"0": 6 / (8 / 3), "1": 1}
    assert expert_load(ExpertTokens(layers=0, counts=b"")) == {}


def test_tokens_of_replicas_add_up_and_imbalances_do_not() -> None:
    reply = {"expert_tokens": {"0": 2, "1": 1}, "expert_imbalance": {"0": 1.5}}
    merged = StatsCall.merge({0: reply, 1: reply | {"expert_tokens": {}}}, 2)
    assert merged["expert_tokens"] == {"0": 2, "1": 1}
    assert merged["expert_imbalance"] == {}
    assert merged["replicas"]["1"] == reply | {"expert_tokens": {}}


def test_a_model_without_experts_has_nothing_to_count(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="--expert-metrics: this model has no experts"):
        InProcessEngine(checkpoint("llama"), expert_metrics=True)
