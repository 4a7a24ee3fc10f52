"""Selects the level of difficulty: the next level begins when the questions of the current one are
answered exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from batches import LENGTHS

REPEATS = -1  # the level before documents: repeated random tokens alone
LAST_LEVEL = len(LENGTHS) - 1
MIXED_FROM = 5  # from this level on, all sizes are mixed


@dataclass
class Curriculum:
    level: int = REPEATS
    steps_here: int = 0
    match: dict[str, float] = field(default_factory=dict)
    """"task@level" -> running share of exactly correct answers."""

    def choose(self, rng: random.Random) -> int:
        """The level of one step: mostly the newest one, sometimes an easier one, and later also
        harder ones."""
        chance = rng.random()
        if self.level <= 0 or chance < (0.65 if self.level < MIXED_FROM else 0.2):
            return self.level
        if chance < 0.85 or self.level < MIXED_FROM - 1 or self.level == LAST_LEVEL:
            return rng.randrange(2 if self.level >= MIXED_FROM else 0, self.level)
        return rng.randint(self.level + 1, LAST_LEVEL)

    def record(self, level: int, answered: dict[str, list[bool]]) -> bool:
        """Record one step's answers. Return True if the next level begins."""
        for task, right in answered.items():
            key, share = f"{task}@{level}", sum(right) / len(right)
            self.match[key] = 0.95 * self.match.get(key, share) + 0.05 * share
        self.steps_here += level == self.level
        if not self._ready():
            return False
        self.level += 1
        self.steps_here = 0
        return True

    def _ready(self) -> bool:
        if self.level == REPEATS:
            return self.steps_here >= 60 and self.match.get(f"repeat@{REPEATS}", 0) > 0.5
        return (
            self.level < LAST_LEVEL
            and self.steps_here >= 40
            and self.match.get(f"qa@{self.level}", 0) > 0.72
        )

    def newest_matches(self) -> dict[str, float]:
        """The running shares of this level and the one before."""
        ends = (f"@{self.level}", f"@{self.level - 1}")
        return {k: round(v, 3) for k, v in self.match.items() if k.endswith(ends)}
