"""Measures a prompt whose KV comes from disk: ``python -m bench.cache_dir``.

Prompts are asked twice in an engine with a cache directory, which is closed; its file is dropped
from the system's page cache. In a second engine, each round asks a new prompt (computed), one of
the first engine's (read from disk), and that one again (from memory). The time is that of the whole
request for one token; rounds are interleaved, and medians and their ratios to computing are
printed.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.dummy_checkpoint import write_dummy_checkpoint
from radixrt import LLM
from radixrt.base.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompt(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(length)]


def ask(llm: LLM, number: int, length: int) -> tuple[float, int]:
    """Seconds of a request, and its tokens from disk."""
    begin = time.perf_counter()
    output = llm.generate(prompt(number, length), ONE_TOKEN)
    return time.perf_counter() - begin, output.answers[0].disk_tokens


def fill(model: str, folder: str, length: int, rounds: int, load_format: str) -> float:
    """Fill the directory; returns the seconds of the start."""
    begin = time.perf_counter()
    with LLM(model, cache_dir=folder, load_format=load_format, log_level="warning") as llm:
        start_s = time.perf_counter() - begin
        for number in [*range(rounds), *range(rounds)]:
            ask(llm, number, length)
        while llm.cache_stats().disk_pages < rounds * ((length - 1) // 16):
            time.sleep(0.1)
    for file in Path(folder).glob("*/r0/pages"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="default: a dummy model of 387 M parameters")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    length, rounds = arguments.prompt_tokens, arguments.rounds
    with tempfile.TemporaryDirectory(prefix="radixrt-cache-dir-") as scratch:
        folder = str(Path(scratch, "cache"))
        model = arguments.model_path or str(write_dummy_checkpoint(Path(scratch, "model")))
        load_format = "auto" if arguments.model_path else "dummy"
        first_s = fill(model, folder, length, rounds, load_format)
        begin = time.perf_counter()
        times: dict[str, list[float]] = {"computed": [], "disk": [], "memory": []}
        read = 0
        with LLM(model, cache_dir=folder, load_format=load_format, log_level="warning") as llm:
            second_s = time.perf_counter() - begin
            for number in range(rounds):
                times["computed"].append(ask(llm, 1000 + number, length)[0])
                seconds, tokens = ask(llm, number, length)
                times["disk"].append(seconds)
                read += tokens
                times["memory"].append(ask(llm, number, length)[0])
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, seconds in medians.items():
            spread = f"{min(times[name]):.4f} to {max(times[name]):.4f}"
            print(f"{name:>9}: {seconds:.4f} s ({spread}), {seconds / medians['computed']:.4f} of computing")  # fmt: skip
        print(f"tokens from disk: {read} of {rounds * ((length - 1) // 16 * 16)}")
        print(f"start: {first_s:.2f} s with an empty directory, {second_s:.2f} s with a full one")


if __name__ == "__main__":
    main()
