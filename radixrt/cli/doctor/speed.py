"""Measures how fast this machine reads memory and multiplies, and which share of both a model gets:
``radixrt doctor --speed``.

A decode step of one sequence reads every weight once, so memory bandwidth bounds it. A prompt is
bounded by products. Both bounds are measured with the kernels that models run on.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.sampling_params import SamplingParams
from radixrt.cli.doctor.machine import Finding, verdict
from radixrt.device.machine import (
    available_memory,
    busy_ticks,
    cpu_quota,
    huge_pages,
    num_cores,
    numa_nodes,
    usable_cpus,
)
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.memory_need import token_work

_WATCH_S = 0.5
_BUSY = 0.1
"""Share of the processors that others may use without a warning."""
_GOOD_SHARE = 0.5
_READ_BYTES = 512 << 20
"""More than caches hold."""
_SIDE, _TOKENS = 4096, 512
"""The shape of the measured products."""
_RUNS = 4
_PROMPT, _ANSWER = 1024, 32
"""Tokens of the model's runs."""


class _Rates(NamedTuple):
    """What this machine reaches with all threads."""

    read: float
    """Bytes a second."""
    products: dict[str, float]
    """Operations a second, two for each multiplication, by the type of the weights."""


def other_programs() -> float:
    """The processors that other programs use now."""
    cpus = usable_cpus()
    before, own = busy_ticks(cpus), time.process_time()
    time.sleep(_WATCH_S)
    after, own = busy_ticks(cpus), time.process_time() - own
    return max(0.0, ((after or 0) - (before or 0)) / 100 - own) / _WATCH_S


def findings(model: str | None, used: float) -> Iterator[Finding]:
    """How well this machine is used; with a model, by its decoding and its prompts.

    Args:
        model: can be served, as its finding says.
        used: processors that other programs use.
    """
    import torch

    import radixrt_kernels

    cpus = usable_cpus()
    threads, cores = torch.get_num_threads(), num_cores(cpus)
    is_busy = used > _BUSY * len(cpus)
    fact = f"Other programs use {used:.1f} of {len(cpus)} processors."
    yield verdict("load", not is_busy, fact, "Stop them, or the numbers below are too low.")
    yield from machine_findings(threads, cores, len(cpus), cpu_quota(), huge_pages(), len(numa_nodes(cpus)))  # fmt: skip
    if radixrt_kernels.native is None or torch.cuda.is_available():
        yield Finding(
            "speed",
            "warning",
            "Speed is measured on CPUs with the native kernels only.",
            "Use the native kernels; a GPU's limits are in its data sheet.",
        )
        return
    rates = _measure(threads)
    one = _read_rate(1) if threads > 1 else rates.read
    products = ", ".join(f"{name} {rate / 1e9:,.0f} GOP/s" for name, rate in rates.products.items())
    yield Finding(
        "machine",
        "ok",
        f"{threads} threads read {rates.read / 1e9:.1f} GB/s (one thread {one / 1e9:.1f}) and multiply {products}.",
    )
    if model is not None:
        yield from _of_model(model, rates, is_busy)


def machine_findings(
    threads: int, cores: int, cpus: int, quota: float | None, pages: str, nodes: int
) -> Iterator[Finding]:
    """What the settings of this machine cost.

    Args:
        threads: with which the kernels compute.
        quota: processors that the control group allows; None: all.
        pages: see ``huge_pages``.
    """
    fitting = max(1, min(cores, int(quota or cores)))
    advice = ""
    if quota is not None and threads > quota:
        advice = f"Raise the limit (cpu.max, --cpus of the container), or serve with --kernel-threads {fitting}."
    elif threads > cores:
        advice = f"Serve with --kernel-threads {fitting}: two threads of one core take turns."
    elif threads < fitting:
        advice = f"Serve with --kernel-threads {fitting}, or unset OMP_NUM_THREADS."
    limit = "" if quota is None else f"; the control group allows the time of {quota:.1f}"
    fact = f"{threads} threads compute on {cores} cores with {cpus} logical processors{limit}."
    yield verdict("threads", not advice, fact, advice)
    yield verdict(
        "huge pages",
        pages in ("always", "madvise"),
        f"Pages of 2 MiB: {pages or 'unknown'}.",
        "As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`. Weights are read a tenth faster.",
    )
    yield Finding(
        "NUMA",
        "ok",
        f"{nodes} NUMA node{'s' * (nodes > 1)}.",
        f"Serve with --tp {nodes} --numa, or for many short requests with --dp {nodes} --numa."
        if nodes > 1
        else "",
    )


def _measure(threads: int) -> _Rates:
    import torch

    from radixrt_kernels import groupwise, linear

    read = _read_rate(threads)
    hidden = torch.ones(_TOKENS, _SIDE, dtype=torch.bfloat16)
    plain = linear.pack(torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16))
    codes = torch.ones(_SIDE, _SIDE, dtype=torch.uint8)
    groups = torch.ones(_SIDE, _SIDE // 128)
    packed = groupwise.pack(codes, groups.half(), groups.byte(), 8, 128)
    operations = 2.0 * _TOKENS * _SIDE**2
    runs: dict[str, Callable[[], Any]] = {
        "bfloat16": partial(linear.linear, hidden, plain, _SIDE),
        "int8": partial(groupwise.linear, hidden, packed),
    }
    return _Rates(read, {name: operations / _best(run) for name, run in runs.items()})


def _read_rate(threads: int) -> float:
    """Bytes of weights a second that a product with one token reads."""
    import torch

    from radixrt_kernels import linear, native

    assert native is not None, "the caller has looked"
    native.set_num_threads(threads)
    rows = min(_READ_BYTES, available_memory() // 4) // (2 * _SIDE) // 16 * 16
    weights = linear.pack(torch.ones(rows, _SIDE, dtype=torch.bfloat16))
    hidden = torch.ones(1, _SIDE, dtype=torch.bfloat16)
    return weights.nbytes / _best(partial(linear.linear, hidden, weights, rows))


def _best(run: Callable[[], Any]) -> float:
    """The shortest of several runs in seconds: other programs only ever add to it."""
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _of_model(model: str, rates: _Rates, is_busy: bool) -> Iterator[Finding]:
    from radixrt.offline.llm import LLM

    work = token_work(Path(resolve_model_path(model, "MODEL", download=False)))
    try:
        with LLM(model, speculation="off", log_level="error") as llm:
            if llm.info.pooling is not None:
                yield Finding("speed", "ok", f"{model} generates no text, so it is not run.")
                return
            length = min(_PROMPT, llm.info.context_length - _ANSWER)
            first, answer, prompt = (
                _shortest(llm, *lengths) for lengths in ((8, 1), (8, 1 + _ANSWER), (length, 1))
            )
            is_small = llm.info.weight_bytes < 1.5 * llm.info.num_parameters
    except (ConfigError, EngineDiedError) as error:
        yield Finding("speed", "error", str(error))
        return
    decode = _ANSWER / max(0.01 * answer, answer - first)
    prefill = (length - 8) / max(0.01 * prompt, prompt - first)
    kind = "int8" if is_small else "bfloat16"
    yield share_finding(
        "decode",
        f"{decode:,.0f} tokens/s for one answer: {work.num_bytes / 1e9:.2f} GB of weights for each token",
        decode * work.num_bytes / rates.read,
        "the rate of reading",
        "Small models wait for the work between kernels: answer several requests at once, or keep speculation on.",
        is_busy,
    )
    yield share_finding(
        "prefill",
        f"{prefill:,.0f} tokens/s of a prompt of {length}: {work.products / 1e9:.2f} G multiplications for each token",
        2 * prefill * work.products / rates.products[kind],
        f"the rate of {kind} products",
        "Small models and long prompts spend more time on attention and activations. --quantization int8 is faster "
        "where int8 products are.",
        is_busy,
    )


def share_finding(
    subject: str, fact: str, share: float, of: str, advice: str, is_busy: bool
) -> Finding:
    """The finding about a measured speed that is ``share`` of a limit."""
    is_good = share >= _GOOD_SHARE
    if is_busy and not is_good:
        advice = "Stop the other programs, and measure again."
    return verdict(subject, is_good, f"{fact}, {share:.0%} of {of}.", advice)


def _shortest(llm: Any, prompt_tokens: int, answer_tokens: int) -> float:
    """Seconds of an answer to a prompt that is in no cache."""
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    highest = llm.info.vocab_size - 1

    def answer() -> None:
        prompt = [random.randint(1, highest) for _ in range(prompt_tokens)]
        llm.generate(prompt, sampling, progress=False)

    return _best(answer)
