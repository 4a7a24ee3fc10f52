"""Bytes a page that a tree takes beyond the ids themselves.

Each tree grows in a process of its own; what counts is how much larger the process gets (so the allocator's
rounding is in), less 4 bytes for each token and page id.
"""

import gc
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.radix_tree.shapes import SHAPES
from bench.radix_tree.subjects import make


@dataclass(frozen=True)
class Weight:
    """What a tree weighs."""

    num_pages: int
    num_nodes: int
    bytes_per_page: float
    """All of it."""
    overhead: float
    """Bytes a page beyond token and page ids, the eviction queue left out."""
    queue: float
    """Bytes a page of the eviction queue."""


def weigh(name: str, shape: str, num_nodes: int, page_size: int) -> Weight:
    """Grow a tree in a fresh process and weigh it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (name, shape, num_nodes, page_size))


def _grow(name: str, shape: str, num_nodes: int, page_size: int) -> Weight:
    subject = make(name, page_size)
    _insert_all(
        make(name, page_size), shape, 1000, page_size
    )  # what is loaded once is not the tree's
    gc.collect()
    before = _resident_bytes()
    num_pages, count = _insert_all(subject, shape, num_nodes, page_size)
    gc.collect()
    total = _resident_bytes() - before
    queue = 0
    if name == "radixrt":
        count = subject.tree.num_nodes
        num_pages = subject.tree.num_pages
        with_queue = _resident_bytes()
        subject.tree._eviction = None
        gc.collect()
        queue = with_queue - _resident_bytes()
    payload = 4 * (page_size + 1)
    return Weight(
        num_pages,
        count,
        total / num_pages,
        (total - queue) / num_pages - payload,
        queue / num_pages,
    )


def _insert_all(subject, shape: str, num_nodes: int, page_size: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    num_pages = count = 0
    for tokens in SHAPES[shape](num_nodes, page_size):
        prompt = subject.prompt(tokens)
        handle, cached = subject.lock(prompt), subject.match(prompt)
        pages = np.arange(len(tokens) // page_size, dtype=np.int32)
        handle = subject.extend(handle, prompt, cached, pages)
        subject.unlock(handle)
        num_pages += (len(tokens) - cached) // page_size
        count += 1
    return num_pages, count


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
