"""Measures prompts whose KV comes from disk: ``python -m bench.cache_dir``.

Prompts are asked twice in an engine with a cache directory, which is closed; its file is dropped
from the system's page cache. In a second engine, each round asks a new prompt (computed), one of
the first engine's (read from disk), and that one again (from memory). The time is that of the whole
request for one token; rounds are interleaved, and medians and their ratios to computing are
printed. Then an answer is generated alone, while prompts are read, and while pages are written: the
gaps between its tokens say what moving pages costs.

Each round computes two prompts. With 4,096 tokens and the default model, one takes some 4 to 15
seconds on two cores.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.dummy_checkpoint import write_dummy_checkpoint
from radixrt import LLM
from radixrt.base.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
WRITE_PATIENCE_S = 60.0
NEW_PROMPTS = 1000
"""Numbers of prompts that are asked once."""


def prompt(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(length)]


def ask(llm: LLM, number: int, length: int) -> tuple[float, int]:
    """Seconds of a request, and its tokens from disk."""
    begin = time.perf_counter()
    output = llm.generate(prompt(number, length), ONE_TOKEN)
    return time.perf_counter() - begin, output.answers[0].disk_tokens


def wait_for_pages(llm: LLM, count: int) -> None:
    """Until so many pages are on disk, or none is added for a minute."""
    seen, since = -1, time.monotonic()
    while (pages := llm.cache_stats().disk_pages) < count:
        if pages != seen:
            seen, since = pages, time.monotonic()
        if time.monotonic() > since + WRITE_PATIENCE_S:
            print(f"only {pages} of {count} pages were written")
            return
        time.sleep(0.05)


def fill(model: str, folder: str, length: int, rounds: int, load_format: str) -> float:
    """Fill the directory; returns the seconds of the start."""
    begin = time.perf_counter()
    with LLM(
        model, cache_dir=folder, load_format=load_format, speculation="off", log_level="warning"
    ) as llm:
        start_s = time.perf_counter() - begin
        for number in range(rounds):
            first, again = ask(llm, number, length)[0], ask(llm, number, length)[0]
            print(
                f"filled {number + 1} of {rounds}: {first:.2f} s, again {again:.3f} s", flush=True
            )
        wait_for_pages(llm, rounds * ((length - 1) // 16))
    for file in Path(folder).glob("*/r0/pages"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return start_s


def gaps_of_an_answer(llm: LLM, num_tokens: int, beside: Callable[[], None] | None) -> list[float]:
    """Seconds between the tokens of an answer, of those that come while something else is done."""
    parameters = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    other = None if beside is None else threading.Thread(target=beside)
    gaps: list[float] = []
    last: float | None = None
    for _ in llm.stream(prompt(-1, 64), parameters):
        now = time.perf_counter()
        if last is None and other is not None:
            other.start()
        elif last is not None and (other is None or other.is_alive()):
            gaps.append(now - last)
        last = now
    if other is not None:
        other.join()
    return gaps


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="default: a dummy model of 387 M parameters")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=400, help="of the answers for gaps; 0: none")  # fmt: skip
    arguments = parser.parse_args()
    length, rounds = arguments.prompt_tokens, arguments.rounds
    with tempfile.TemporaryDirectory(prefix="radixrt-cache-dir-") as scratch:
        folder = str(Path(scratch, "cache"))
        model = arguments.model_path or str(write_dummy_checkpoint(Path(scratch, "model")))
        load_format = "auto" if arguments.model_path else "dummy"
        # twice as many prompts: the second half is read beside an answer
        first_s = fill(model, folder, length, 2 * rounds if arguments.answer_tokens else rounds, load_format)  # fmt: skip
        begin = time.perf_counter()
        times: dict[str, list[float]] = {"computed": [], "disk": [], "memory": []}
        read = 0
        with LLM(
            model, cache_dir=folder, load_format=load_format, speculation="off", log_level="warning"
        ) as llm:
            second_s = time.perf_counter() - begin
            for number in range(rounds):
                times["computed"].append(ask(llm, NEW_PROMPTS + number, length)[0])
                seconds, tokens = ask(llm, number, length)
                times["disk"].append(seconds)
                read += tokens
                times["memory"].append(ask(llm, number, length)[0])
            report(times, read, rounds * ((length - 1) // 16 * 16))
            print(
                f"start: {first_s:.2f} s with an empty directory, {second_s:.2f} s with a full one"
            )
            if arguments.answer_tokens:
                measure_gaps(llm, arguments.answer_tokens, length, rounds)


def report(times: dict[str, list[float]], read: int, most: int) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.4f} to {max(times[name]):.4f}"
        print(f"{name:>9}: {seconds:.4f} s ({spread}), {seconds / medians['computed']:.4f} of computing")  # fmt: skip
    print(f"tokens from disk: {read} of {most}", flush=True)


def measure_gaps(llm: LLM, num_tokens: int, length: int, rounds: int) -> None:
    """The gaps of an answer, with and without pages that move."""

    def ask_again() -> None:
        for number in range(rounds, 2 * rounds):
            ask(llm, number, length)

    def write() -> None:
        for number in range(rounds):  # the second use of what was computed
            ask(llm, NEW_PROMPTS + number, length)

    for what, beside in (
        ("alone", None),
        ("beside prompts from disk", ask_again),
        ("beside prompts from memory", ask_again),
        ("beside prompts from memory that are written", write),
    ):
        gaps = gaps_of_an_answer(llm, num_tokens, beside)
        if gaps:
            print(f"gaps {what}: median {statistics.median(gaps) * 1e3:.2f} ms, p99 {p99(gaps) * 1e3:.2f} ms of {len(gaps)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
