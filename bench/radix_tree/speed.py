"""Microseconds of each operation, tree against tree.

All trees of a case are built first; then rounds alternate between them, so that whatever else runs on the machine
slows them alike. What is reported is the median of all rounds.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bench.radix_tree.shapes import CHUNK, documents, random_tokens
from bench.radix_tree.subjects import Subject, make
from radixrt.messages.ids import TokenIds

OPERATIONS = ("match", "match miss", "lock + unlock", "insert page", "insert chunk", "evict 16")


@dataclass
class Case:
    """A tree of about ``num_nodes`` nodes that holds one prompt of ``num_tokens`` tokens."""

    name: str
    page_size: int
    num_nodes: int
    num_tokens: int
    branches: bool
    """Every chunk of the prompt has another continuation beside it, so none of its nodes can be joined."""
    microseconds: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.microseconds.items()}


class Bench:
    """One tree, built and ready, with operations that leave it about as it was."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(1)
        self.subject: Subject = make(case.name, case.page_size)
        self._pages = itertools.count()
        for tokens in documents(case.num_nodes, case.page_size):
            self._insert(tokens)
        self.tokens = random_tokens(self.rng, case.num_tokens // case.page_size * case.page_size)
        for end in range(CHUNK, len(self.tokens) + CHUNK, CHUNK):
            self._insert(self.tokens[:end])
            if case.branches and end < len(self.tokens):
                aside = random_tokens(self.rng, case.page_size)
                self._insert(np.concatenate((self.tokens[:end], aside)))
        self.prompt = self.subject.prompt(self.tokens)
        self.stranger = self.subject.prompt(random_tokens(self.rng, len(self.tokens)))
        assert self.subject.match(self.prompt) == len(self.tokens)

    def _pages_for(self, tokens: TokenIds) -> np.ndarray:
        return np.arange(len(tokens) // self.case.page_size, dtype=np.int32)

    def _insert(self, tokens: TokenIds) -> None:
        subject, prompt = self.subject, self.subject.prompt(tokens)
        handle, cached = subject.lock(prompt), subject.match(prompt)
        if cached < len(tokens):
            handle = subject.extend(handle, prompt, cached, self._pages_for(tokens))
        subject.unlock(handle)

    def round(self) -> None:
        """Measure every operation once."""
        subject = self.subject
        self._time("match", lambda: subject.match(self.prompt))
        self._time("match miss", lambda: subject.match(self.stranger))
        self._time("lock + unlock", lambda: subject.unlock(subject.lock(self.prompt)))
        self._time_insert("insert page", self.case.page_size)
        self._time_insert("insert chunk", CHUNK)
        self._time("evict 16", lambda: subject.evict(16))

    def _time_insert(self, name: str, num_tokens: int) -> None:
        """A locked prompt gets a continuation."""
        tokens = np.concatenate((self.tokens, random_tokens(self.rng, num_tokens)))
        prompt, pages = self.subject.prompt(tokens), self._pages_for(tokens)
        handle = self.subject.lock(self.prompt)
        start = time.perf_counter_ns()
        handle = self.subject.extend(handle, prompt, len(self.tokens), pages)
        self._note(name, start)
        self.subject.unlock(handle)

    def _time(self, name: str, operation: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        operation()
        self._note(name, start)

    def _note(self, name: str, start: int) -> None:
        elapsed = (time.perf_counter_ns() - start) / 1000
        self.case.microseconds.setdefault(name, []).append(elapsed)


def measure(cases: list[Case], rounds: int) -> None:
    """Fill in the microseconds of cases that are to be compared with one another."""
    benches = [Bench(case) for case in cases]
    for _ in range(rounds):
        for bench in benches:
            bench.round()
    for bench in benches:
        bench.subject.evict(10**9)  # nodes that hold each other are not collected
