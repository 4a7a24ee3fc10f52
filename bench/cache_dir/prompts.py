"""Prompts, the models that compute them, and directories that hold their KV."""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.dummy_checkpoint import write_dummy_checkpoint
from radixrt import LLM
from radixrt.base.config import DEMO_MODEL
from radixrt.base.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
PAGE = 16
NEW_PROMPTS = 1000
"""Numbers of prompts from here on are asked once."""
_WRITE_PATIENCE_S = 60.0


def prompt(number: int, length: int) -> list[int]:
    """Token ids that no other number has."""
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(length)]


def large_model(scratch: Path) -> dict[str, str]:
    """The settings of a dummy model of 387 M parameters."""
    model = str(write_dummy_checkpoint(scratch / "model"))
    return {"model": model, "load_format": "dummy"}


def builtin_model() -> dict[str, str]:
    """The settings of the model that comes with radixrt, which computes a prompt in a second."""
    return {"model": DEMO_MODEL}


def engine(model: dict[str, str], folder: Path | None = None, **settings: Any) -> LLM:
    """An engine, with a cache directory if ``folder`` is given."""
    if folder is not None:
        settings["cache_dir"] = str(folder)
    return LLM(**model, speculation="off", log_level="warning", **settings)  # type: ignore[arg-type]


def ask(llm: LLM, number: int, length: int) -> tuple[float, int]:
    """Seconds of a request for one token, and its tokens from disk."""
    begin = time.perf_counter()
    output = llm.generate(prompt(number, length), ONE_TOKEN)
    return time.perf_counter() - begin, output.answers[0].disk_tokens


def fill(model: dict[str, str], folder: Path, numbers: Sequence[int], length: int) -> float:
    """Ask prompts twice in an engine with a cache directory, and drop its file from the system's
    page cache; returns the seconds of the engine's start."""
    begin = time.perf_counter()
    with engine(model, folder) as llm:
        start_s = time.perf_counter() - begin
        for number in numbers:
            first, again = ask(llm, number, length)[0], ask(llm, number, length)[0]
            print(f"filled {number}: {first:.2f} s, again {again:.3f} s", flush=True)
        _wait_for_pages(llm, len(numbers) * ((length - 1) // PAGE))
    drop_from_page_cache(folder)
    return start_s


def _wait_for_pages(llm: LLM, count: int) -> None:
    """Until so many pages are on disk, or none is added for a minute."""
    seen, since = -1, time.monotonic()
    while (pages := llm.cache_stats().disk_pages) < count:
        if pages != seen:
            seen, since = pages, time.monotonic()
        if time.monotonic() > since + _WRITE_PATIENCE_S:
            print(f"only {pages} of {count} pages were written")
            return
        time.sleep(0.05)


def drop_from_page_cache(folder: Path) -> None:
    """Let the next read of the pages come from the disk itself."""
    for file in folder.glob("*/r*/pages*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
