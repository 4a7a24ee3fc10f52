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

from bench.radix_tree.shapes import prompts
from bench.radix_tree.subjects import Radixrt, Subject, make
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.node import Node


@dataclass(frozen=True)
class Weight:
    """What a tree weighs."""

    num_pages: int
    num_nodes: int
    overhead: float
    """Bytes a page beyond token and page ids, the eviction queue left out."""
    queue: float
    """Bytes a page of the eviction queue. The published designs have none: they collect leaves when they evict."""


class NoQueue(EvictionPolicy):
    """In the place of an eviction policy: remembers nothing."""

    def offer(self, leaf: Node) -> None:
        pass

    def pop(self) -> None:
        return None


def weigh(name: str, shape: str, num_nodes: int, page_size: int) -> Weight:
    """Grow a tree in a fresh process and weigh it; the project's own also without its eviction queue."""
    grown = _in_new_process(name, shape, num_nodes, page_size, True)
    bare = grown
    if name == "radixrt":
        bare = _in_new_process(name, shape, num_nodes, page_size, False)
    num_pages, num_tree_nodes, total = grown
    payload = 4 * (page_size + 1)
    return Weight(
        num_pages, num_tree_nodes, bare[2] / num_pages - payload, (total - bare[2]) / num_pages
    )


def _in_new_process(*arguments: object) -> tuple[int, int, int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, arguments)


def _grow(
    name: str, shape: str, num_nodes: int, page_size: int, with_queue: bool
) -> tuple[int, int, int]:
    """Pages and nodes of a new tree, and how many bytes larger it makes the process."""
    subject = make(name, page_size)
    if not with_queue:
        subject = Radixrt(page_size, NoQueue())
    _insert_all(make(name, page_size), "documents", 1000, page_size)  # loads what is loaded once
    gc.collect()
    before = _resident_bytes()
    num_pages = _insert_all(subject, shape, num_nodes, page_size)
    gc.collect()
    return num_pages, subject.num_nodes(), _resident_bytes() - before


def _insert_all(subject: Subject, shape: str, num_nodes: int, page_size: int) -> int:
    num_pages = 0
    for tokens in prompts(shape, num_nodes, page_size):
        prompt = subject.prompt(tokens)
        handle, cached = subject.lock(prompt), subject.match(prompt)
        pages = np.arange(len(tokens) // page_size, dtype=np.int32)
        subject.unlock(subject.extend(handle, prompt, cached, pages))
        num_pages += (len(tokens) - cached) // page_size
    return num_pages


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
