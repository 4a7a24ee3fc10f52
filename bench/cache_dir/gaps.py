"""The gaps between the tokens of an answer while pages are read from disk, against the same requests
answered from memory."""

import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

from bench.cache_dir.prompts import ask, engine, fill, large_model
from bench.cache_dir.returning import verdict
from radixrt import LLM
from radixrt.base.sampling_params import SamplingParams

PROMPTS = 6
ANSWER_PROMPT = list(range(3, 67))
ENGINES = ("memory", "disk")


def measure_gaps(length: int, rounds: int, num_tokens: int) -> None:
    """Two engines: one with room for all prompts, and one with room for a third of them, which
    reads each of them anew. In turns, each generates an answer while a client asks for the prompts,
    one after another."""
    parameters = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="radixrt-cache-dir-") as scratch:
        model, folder = large_model(Path(scratch)), Path(scratch, "cache")
        fill(model, folder, range(PROMPTS), length)
        small = PROMPTS // 3 * length + 2 * (len(ANSWER_PROMPT) + num_tokens)
        gaps: dict[str, list[float]] = {name: [] for name in ENGINES}
        asked: dict[str, int] = dict.fromkeys(ENGINES, 0)
        read = 0
        with engine(model, folder, max_total_tokens=small) as moving, engine(model) as still:
            for number in range(PROMPTS):
                ask(still, number, length)
            for _ in range(rounds):
                for name, llm in (("memory", still), ("disk", moving)):
                    begin = llm.cache_stats().disk_tokens if name == "disk" else 0
                    taken, count = _gaps_beside(llm, parameters, length)
                    gaps[name] += taken
                    asked[name] += count
                    if name == "disk":
                        read += llm.cache_stats().disk_tokens - begin
    for name, values in gaps.items():
        print(f"{name:>6}: {len(values)} gaps, median {_quantile(values, 0.5) * 1e3:.2f} ms, p99 {_quantile(values, 0.99) * 1e3:.2f} ms, {asked[name]} prompts beside them")  # fmt: skip
    print(f"tokens from disk: {read} of {asked['disk'] * (length - 1)}")
    ratio = _quantile(gaps["disk"], 0.99) / _quantile(gaps["memory"], 0.99)
    verdict("p99 of gaps while pages move, against memory", ratio, 1.10)


def _gaps_beside(llm: LLM, parameters: SamplingParams, length: int) -> tuple[list[float], int]:
    """Seconds between the tokens of an answer, and the prompts that were asked for meanwhile."""
    ended, asked = threading.Event(), 0

    def ask_all() -> None:
        nonlocal asked
        while not ended.is_set():
            ask(llm, asked % PROMPTS, length)
            asked += 1
            ended.wait(0.2)  # as many a second in both engines, or nearly

    client = threading.Thread(target=ask_all)
    times = []
    for _ in llm.stream(ANSWER_PROMPT, parameters):
        if not times:
            client.start()
        times.append(time.perf_counter())
    ended.set()
    client.join()
    return [after - before for before, after in pairwise(times)], asked


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
