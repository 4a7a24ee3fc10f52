"""Runs the largest step before there is a KV pool: torch and the libraries allocate the memory that
steps need, and every kernel is compiled or loaded."""

import math

import numpy as np
import torch

from radixrt.attention.flashinfer import lacks_kernels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.constrained.bitmask import bitmask_words
from radixrt.device.device import Device
from radixrt.messages.ids import num_ids, pack_ids
from radixrt.messages.steps import Admit, Prefill, StepPlan
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.pooling import EncoderRunner
from radixrt.worker.runner import ModelRunner
from radixrt.worker.runner_parts import RunnerParts
from radixrt.worker.sampling.matchers import TokenMask
from radixrt.worker.sampling.restrictions import ALL_TOKENS
from radixrt.worker.sampling.sampler import fastest_draw, sample
from radixrt.worker.sampling.state import SamplingState

DEAREST_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=0)
"""Sorts every row."""

OTHER_SAMPLING = SamplingParams(
    temperature=1.0,
    seed=0,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={0: -1.0},
    logprobs=1,
)
"""Sampling settings that need further kernels, which the steps before have not called."""


def try_largest_step(parts: RunnerParts, context_length: int) -> None:
    """Run the largest step, a decode step and a small one, so that torch and the libraries allocate
    all memory that steps need, and compile or load every kernel.

    The device memory that is free afterwards is available for the KV pool.

    Raises:
        ConfigError: the step does not fit into the memory, or a kernel is missing.
    """
    plan = largest_step(parts.config, parts.setup.max_rows, context_length)
    decode = StepPlan(step_id=1)  # of every slot: it loads the decode kernels
    try:
        runner = ModelRunner(parts, KVPool(parts.setup, num_pages(plan), one_for_all=True))
        runner.step(plan)
        runner.step(decode)
        runner.step(small_step(plan))
        runner.collect()
        draw_every_way(parts.model.vocab_size, parts.setup.device)
    except torch.OutOfMemoryError as error:
        raise _too_large(parts.config, parts.setup.max_rows, error) from error
    except RuntimeError as error:
        explained = lacks_kernels(error)
        if explained is None:
            raise
        raise explained from error


@torch.inference_mode()
def draw_every_way(vocab_size: int, device: Device) -> None:
    """Draw a token with penalties, a bias and log-probabilities, under a mask: Triton compiles a
    kernel at its first call, which would stop the serving loop for seconds."""
    state = SamplingState(2, vocab_size, device=device)
    token_ids = np.zeros(2, dtype=np.int32)
    state.admit(0, DEAREST_SAMPLING, token_ids, 1)
    state.admit(1, OTHER_SAMPLING, token_ids, 1)
    logits = torch.zeros((2, vocab_size), dtype=torch.float32, device=device.torch_device)
    (positions,) = device.upload(np.full(2, len(token_ids)))
    everything = np.full((1, bitmask_words(vocab_size)), ALL_TOKENS, dtype=np.int32)
    mask = TokenMask(rows=np.array([1]), bits=everything)
    sampled = sample(state, logits, [0, 1], positions, mask, fastest_draw(device.torch_device))
    device.download(sampled.tensors()).wait()


def largest_step(config: ServerConfig, slots: int, context_length: int) -> StepPlan:
    """A step as large as the scheduler ever plans one, in memory: every slot samples, and the
    prefill budget is spent."""
    length = min(max(1, context_length - 1), math.ceil(config.prefill_budget("cuda") / slots) + 1)
    pages = math.ceil((length + 1) / config.page_size)  # a decode step may follow
    prompt = pack_ids(np.zeros(length, dtype=np.int32))
    admit, prefill = [], []
    for slot in range(slots):
        own = pack_ids(range(slot * pages, (slot + 1) * pages))
        admit.append(Admit(slot, prompt, 0, own, DEAREST_SAMPLING, 0))
        prefill.append(Prefill(slot, 0, length))
    return StepPlan(step_id=0, admit=admit, prefill=prefill)


def small_step(largest: StepPlan) -> StepPlan:
    """The first two tokens of a prompt alone. No row samples, and attention may have another kernel
    than in the largest step: on Hopper FA2 in place of FA3."""
    first = largest.admit[0]
    prompt = pack_ids(np.zeros(3, dtype=np.int32))
    return StepPlan(
        step_id=2,
        release=[admit.slot for admit in largest.admit],
        admit=[Admit(first.slot, prompt, 0, first.pages, DEAREST_SAMPLING, 0)],
        prefill=[Prefill(first.slot, 0, 2)],
    )


def try_largest_prompts(runner: EncoderRunner, config: ServerConfig, context_length: int) -> None:
    """Run the largest step of an encoder: as many prompts of the whole context as the prefill
    budget has, or one.

    Raises:
        ConfigError: the step does not fit into the memory.
    """
    count = max(1, config.prefill_budget("cuda") // context_length)
    lengths = [max(1, context_length - (slot > 0)) for slot in range(count)]  # unequal: with a mask
    prompts = [pack_ids(np.zeros(length, dtype=np.int32)) for length in lengths]
    admit = [Admit(slot, ids, 0, b"", PREFILL_ONLY, 0) for slot, ids in enumerate(prompts)]
    prefill = [Prefill(slot, 0, length) for slot, length in enumerate(lengths)]
    try:
        runner.step(StepPlan(step_id=0, admit=admit, prefill=prefill))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{count} prompts of --context-length {context_length} (--max-prefill-tokens {config.prefill_budget('cuda')}) do not "
            f"fit into the memory that the weights leave: lower one of the two. ({error})"
        ) from error


def num_pages(plan: StepPlan) -> int:
    """Pages that a plan's sequences have."""
    return sum(num_ids(admit.pages) for admit in plan.admit)


def _too_large(config: ServerConfig, slots: int, error: torch.OutOfMemoryError) -> ConfigError:
    """The error for a step that does not fit."""
    return ConfigError(
        f"A step of --max-prefill-tokens {config.prefill_budget('cuda')} and --max-running-requests "
        f"{slots} does not fit into the memory that the weights leave: lower one of them, or spread "
        f"the model over more GPUs with --tp. ({error})"
    )
