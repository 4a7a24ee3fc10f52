"""Parts 1 to 5, what users see: each takes a running engine and writes its results."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.constrained import Load, measure_masks
from bench.gpu.ceilings import Ceilings
from bench.gpu.results import Result, Results
from bench.gpu.roofline import Length, Scheduling, step_seconds, workload_bound
from bench.gpu.shapes import ModelShape
from bench.gpu.workloads import Sizes, of_length, sharegpt_like, token_ids, uniform
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.llm import LLM

CONSTRAINED_ROUNDS = 2


@dataclass(frozen=True)
class Bench:
    """What every part needs."""

    llm: LLM
    shape: ModelShape
    ceilings: Ceilings
    sizes: Sizes
    results: Results
    case: str
    """Tells this engine from the others of the run."""

    @property
    def running(self) -> int:
        return self.llm.info.max_running_requests

    @property
    def scheduling(self) -> Scheduling:
        config = self.llm.config
        return Scheduling(self.running, config.prefill_budget("cuda"))


def warm_up(bench: Bench) -> None:
    """Let everything be compiled and allocated that a first request finds missing."""
    prompts = token_ids([64, 300, 1000], bench.shape.vocab_size, seed=99)
    settings = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, ignore_eos=True, seed=1),
        SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, seed=2),
    ]
    bench.llm.generate(prompts, settings, progress=False)
    bench.llm.flush_cache()


def _timed(bench: Bench, lengths: Sequence[Length], temperature: float) -> float:
    """Seconds for prompts of these lengths, all asked at once."""
    prompts = token_ids([length.prompt for length in lengths], bench.shape.vocab_size)
    settings = [
        of_length(length.output, temperature=temperature, seed=index)
        for index, length in enumerate(lengths)
    ]
    bench.llm.flush_cache()
    begin = time.perf_counter()
    outputs = bench.llm.generate(prompts, settings, progress=False)
    seconds = time.perf_counter() - begin
    generated = sum(len(output.token_ids) for output in outputs)
    wanted = sum(length.output for length in lengths)
    if generated != wanted:
        raise RuntimeError(f"{generated} tokens came, {wanted} were asked for")
    return seconds


def _throughput(bench: Bench, part: int, lengths: Sequence[Length], temperature: float) -> None:
    seconds = _timed(bench, lengths, temperature)
    bound = workload_bound(bench.shape, bench.ceilings, lengths, bench.scheduling)
    output = sum(length.output for length in lengths)
    total = output + sum(length.prompt for length in lengths)
    bench.results.add(
        Result(
            part,
            f"{bench.shape.name}{bench.case}",
            {
                "output tokens/s": output / seconds,
                "total tokens/s": total / seconds,
                "seconds": seconds,
                "output tokens": output,
            },
            {"output tokens/s": output / bound.seconds},
            f"at best {bound.seconds:.2f} s in {bound.steps} steps: {bound.gigabytes:,.0f} GB, "
            f"{bound.teraflops:,.0f} TFLOP",
        )
    )


def offline(bench: Bench) -> None:
    """Part 1."""
    _throughput(bench, 1, sharegpt_like(bench.sizes), temperature=1.0)


def mixed_lengths(bench: Bench) -> None:
    """Part 2."""
    _throughput(bench, 2, uniform(bench.sizes), temperature=0.6)


def shared_prefix(bench: Bench) -> None:
    """Part 3: decode steps of many questions about one document, whose KV is cached."""
    sizes, cascade = bench.sizes, not bench.llm.config.debug_disable_cascade
    (prefix,) = token_ids([sizes.prefix], bench.shape.vocab_size)
    questions = token_ids([sizes.question] * sizes.questions, bench.shape.vocab_size, seed=1)
    prompts = [prefix + question for question in questions]
    bench.llm.flush_cache()
    bench.llm.generate([prefix], of_length(1), progress=False)
    begin = time.perf_counter()
    bench.llm.generate(prompts, of_length(1), progress=False)
    questions_s = time.perf_counter() - begin
    begin = time.perf_counter()
    bench.llm.generate(prompts, of_length(sizes.answer), progress=False)
    seconds = time.perf_counter() - begin
    rows = min(sizes.questions, bench.running)
    own = sizes.question + sizes.answer / 2
    attended = rows * (sizes.prefix + own)
    context = sizes.prefix + rows * own if cascade else attended
    step_s, _, _ = step_seconds(
        bench.shape, bench.ceilings, tokens=rows, rows=rows, context=context, attended=attended
    )
    # The prompts' KV is in the cache by now, so all but the first token of each answer are decode
    # steps.
    decoded = sizes.questions * (sizes.answer - 1)
    decode_s = max(seconds - questions_s, 1e-9)
    bench.results.add(
        Result(
            3,
            f"{bench.shape.name}, cascade {'on' if cascade else 'off'}",
            {
                "decoded tokens/s": decoded / decode_s,
                "seconds": seconds,
                "of it the first tokens": questions_s,
            },
            {"decoded tokens/s": rows / step_s},
        )
    )


def latency(bench: Bench) -> None:
    """Part 4, without HTTP."""
    sizes = bench.sizes
    for concurrency in sizes.concurrencies:
        bench.llm.flush_cache()
        count = max(2 * concurrency, 4)
        prompts = token_ids([sizes.latency_prompt] * count, bench.shape.vocab_size, concurrency)
        records = bench.llm.background.run(_streams(bench.llm, prompts, concurrency, sizes))
        first = np.array([times[1] - times[0] for times in records]) * 1e3
        gaps = np.concatenate([np.diff(times[1:]) for times in records]) * 1e3
        context = concurrency * (sizes.latency_prompt + sizes.latency_output / 2)
        step_s, _, _ = step_seconds(
            bench.shape, bench.ceilings,
            tokens=concurrency, rows=concurrency, context=context, attended=context,
        )  # fmt: skip
        prompt_s, _, _ = step_seconds(
            bench.shape, bench.ceilings,
            tokens=sizes.latency_prompt, rows=1, context=0, attended=sizes.latency_prompt**2 / 2,
        )  # fmt: skip
        bench.results.add(
            Result(
                4,
                f"{bench.shape.name}, {concurrency} at a time",
                {
                    "TTFT ms, median": float(np.median(first)),
                    "TTFT ms, p99": float(np.percentile(first, 99)),
                    "ITL ms, median": float(np.median(gaps)),
                    "ITL ms, p99": float(np.percentile(gaps, 99)),
                },
                {"TTFT ms, median": prompt_s * 1e3, "ITL ms, median": step_s * 1e3},
            )
        )


async def _streams(
    llm: LLM, prompts: list[list[int]], concurrency: int, sizes: Sizes
) -> list[list[float]]:
    """For each prompt, when it was sent and when each chunk came; ``concurrency`` at a time."""
    places = asyncio.Semaphore(concurrency)
    client = llm.background.client

    async def one(index: int, prompt: list[int]) -> list[float]:
        async with places:
            times = [time.perf_counter()]
            request = GenerateRequest(
                request_id=f"latency-{concurrency}-{index}",
                prompt=TokenPrompt(pack_ids(prompt)),
                stream=True,
                options=RequestOptions(sampling=of_length(sizes.latency_output, seed=index)),
            )
            async for chunk in client.generate(request):
                if chunk.token_ids:
                    times.append(time.perf_counter())
            return times

    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


def constrained(bench: Bench) -> None:
    """Part 5: JSON by a schema that no answer completes, and free answers of the same length."""
    sizes = bench.sizes
    cost = measure_masks(
        Load(bench.llm.background), sizes.constrained, sizes.constrained_output, CONSTRAINED_ROUNDS
    )
    bench.results.add(
        Result(
            5,
            f"{bench.shape.name}, {cost.concurrency} at a time",
            {
                "free tokens/s": cost.free_tokens_per_s,
                "constrained tokens/s": cost.constrained_tokens_per_s,
                "constrained / free": cost.ratio,
            },
        )
    )


PARTS: dict[int, Callable[[Bench], None]] = {
    1: offline,
    2: mixed_lengths,
    3: shared_prefix,
    4: latency,
    5: constrained,
}
