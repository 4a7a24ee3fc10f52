"""A prompt that returns after a restart: computed, from disk, and from memory."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from bench.cache_dir.prompts import (
    NEW_PROMPTS,
    PAGE,
    ask,
    builtin_model,
    drop_from_page_cache,
    engine,
    fill,
    large_model,
)

SLOW_DISK = '''"""Lets each read of a process take as long as on a slow disk."""
import os, time

_preadv = os.preadv

def preadv(fd, buffers, offset, *flags):
    done = _preadv(fd, buffers, offset, *flags)
    time.sleep(done / {bytes_per_s})
    return done

os.preadv = preadv
'''
"""A module that Python imports at its start. Only the reads of pages use preadv."""


def measure_disk(length: int, rounds: int) -> None:
    """In each round a new prompt, one of a dead engine's, and that one again."""
    with tempfile.TemporaryDirectory(prefix="radixrt-cache-dir-") as scratch:
        model, folder = large_model(Path(scratch)), Path(scratch, "cache")
        first_s = fill(model, folder, range(rounds), length)
        times: dict[str, list[float]] = {"computed": [], "disk": [], "memory": []}
        read, begin = 0, time.perf_counter()
        with engine(model, folder) as llm:
            second_s = time.perf_counter() - begin
            for number in range(rounds):
                times["computed"].append(ask(llm, NEW_PROMPTS + number, length)[0])
                seconds, tokens = ask(llm, number, length)
                times["disk"].append(seconds)
                read += tokens
                times["memory"].append(ask(llm, number, length)[0])
        ratios = _report(times, "computed")
        print(f"tokens from disk: {read} of {rounds * ((length - 1) // PAGE * PAGE)}")
        print(f"start: {first_s:.2f} s with an empty directory, {second_s:.2f} s with a full one")
        verdict("disk against computing", ratios["disk"], 0.06)


def measure_cheap_model(length: int, rounds: int, mb_per_s: float | None) -> None:
    """The built-in model, which computes about as fast as a disk reads: an engine with a directory
    that has the prompts, against one without any.

    Args:
        mb_per_s: of the disk; None: as it is.
    """
    model = builtin_model()
    with tempfile.TemporaryDirectory(prefix="radixrt-cache-dir-") as scratch:
        folder = Path(scratch, "cache")
        fill(model, folder, range(rounds + 1), length)
        times: dict[str, list[float]] = {"no directory": [], "directory": []}
        read = 0
        with _disk_at(mb_per_s, Path(scratch, "site")), engine(model, folder) as llm, engine(model) as plain:  # fmt: skip
            for number in (NEW_PROMPTS, rounds):  # both learn their rates
                ask(llm, number, length)
                ask(plain, number, length)
            drop_from_page_cache(folder)
            for number in range(rounds):
                times["no directory"].append(ask(plain, number, length)[0])
                seconds, tokens = ask(llm, number, length)
                times["directory"].append(seconds)
                read += tokens
        ratios = _report(times, "no directory")
        print(f"tokens from disk: {read} of {rounds * ((length - 1) // PAGE * PAGE)}")
        name = "built-in model" if mb_per_s is None else f"a disk at {mb_per_s:g} MB/s"
        verdict(f"{name}, against no directory", ratios["directory"], 1.05)


@contextmanager
def _disk_at(mb_per_s: float | None, site: Path) -> Iterator[None]:
    """Engines that start here read at most so fast."""
    if mb_per_s is None:
        yield
        return
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW_DISK.format(bytes_per_s=mb_per_s * 1e6))
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict("os.environ", {"PYTHONPATH": path}):
        yield


def _report(times: dict[str, list[float]], base: str) -> dict[str, float]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.4f} to {max(times[name]):.4f}"
        print(f"{name:>12}: {seconds:.4f} s ({spread}), {seconds / medians[base]:.4f} of {base}")
    return {name: seconds / medians[base] for name, seconds in medians.items()}


def verdict(what: str, ratio: float, bar: float) -> None:
    """Print whether a ratio is within its bar."""
    print(f"{'ok' if ratio <= bar else 'MISSED'}: {what}: {ratio:.4f}, bar {bar}", flush=True)
