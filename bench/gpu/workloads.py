"""The requests of each part: seeded lengths and random token ids, and how few of them a dry run
takes."""

import math
from dataclasses import dataclass

import numpy as np

from bench.gpu.roofline import Length
from radixrt.base.sampling_params import SamplingParams

SEED = 0
SPREAD = 0.9
"""Standard deviation of the logarithm of ShareGPT-like lengths: the mean of 220 comes with a median
of 147."""

LONGEST = 4096
"""Tokens of a prompt or an answer; a log-normal has no end of its own."""


@dataclass(frozen=True)
class Sizes:
    """How much of each part is run."""

    offline_prompts: int = 1000
    mean_prompt: int = 220
    mean_output: int = 200
    mixed_sequences: int = 256
    mixed_range: tuple[int, int] = (100, 1024)
    prefix: int = 8192
    questions: int = 256
    question: int = 32
    answer: int = 128
    concurrencies: tuple[int, ...] = (1, 8, 32, 128)
    latency_prompt: int = 512
    latency_output: int = 128
    constrained: int = 64
    constrained_output: int = 256
    anatomy: tuple[tuple[int, int], ...] = ((256, 512), (256, 1024), (64, 1024), (1, 1024))
    """Decode steps alone: sequences, and tokens of context of each in the middle of what is
    measured. What is worth the most comes first."""
    anatomy_steps: int = 50


DRY = Sizes(
    offline_prompts=6,
    mean_prompt=12,
    mean_output=6,
    mixed_sequences=4,
    mixed_range=(4, 12),
    prefix=64,
    questions=4,
    question=4,
    answer=4,
    concurrencies=(1, 2),
    latency_prompt=8,
    latency_output=4,
    constrained=2,
    constrained_output=8,
    anatomy=((2, 48),),
    anatomy_steps=4,
)
"""Everything once, in the smallest size: does it run?"""


def sharegpt_like(sizes: Sizes) -> list[Length]:
    """Log-normal lengths around the means."""
    random = np.random.default_rng(SEED)
    columns = []
    for mean in (sizes.mean_prompt, sizes.mean_output):
        drawn = random.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, sizes.offline_prompts)
        columns.append(np.clip(np.rint(drawn), 4, LONGEST).astype(int).tolist())
    return [Length(prompt, output) for prompt, output in zip(*columns, strict=True)]


def uniform(sizes: Sizes) -> list[Length]:
    """Prompts and answers of even distribution: the benchmark of nano-vllm and mini-sglang."""
    random = np.random.default_rng(SEED)
    low, high = sizes.mixed_range
    prompts, outputs = random.integers(low, high + 1, (2, sizes.mixed_sequences)).tolist()
    return [Length(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def token_ids(lengths: list[int], vocab_size: int, seed: int = SEED) -> list[list[int]]:
    """Random prompts, of tokens that are no special ones."""
    random = np.random.default_rng(seed)
    return [random.integers(vocab_size // 8, vocab_size - 1, n).tolist() for n in lengths]


def of_length(output: int, *, temperature: float = 1.0, seed: int = 0) -> SamplingParams:
    """An answer of exactly ``output`` tokens."""
    return SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True, seed=seed)
