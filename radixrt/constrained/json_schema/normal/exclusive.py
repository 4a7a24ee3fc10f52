"""Which combinations of branches of ``anyOf`` and ``oneOf`` can a value satisfy?"""

import itertools
from collections.abc import Callable

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Flat, Flattener

MAX_COMBINATIONS = 64
"""Alternatives that branches are multiplied out to; beyond, a choice stays beside the form."""
MAX_PAIRS = 2000
"""Pairs of branches of one ``oneOf`` that are compared."""
MAX_OVERLAPPING = 4
"""Overlapping branches that are made disjoint by denying one another."""


class Alternatives:
    """Simplifies the choices of a conjunction."""

    def __init__(self, flattener: Flattener, is_empty: Callable[[list[Schema]], bool]) -> None:
        self._flattener = flattener
        self._is_empty = is_empty

    def simplify(self, flat: Flat) -> None:
        """Turn ``oneOf`` into choices and drop denials that can't be met, where either is certain."""
        opaque = []
        for raw in flat.opaque:
            if "not" in raw and self._is_empty([*flat.simple, raw["not"]]):
                continue
            if "if" in raw and self._is_empty([*flat.simple, raw["if"]]):
                flat.choices.append([raw.get("else", True)])
                continue
            opaque.append(raw)
        flat.opaque = opaque
        exclusives = []
        for branches in flat.exclusives:
            live = [b for b in branches if not self._is_empty([*flat.simple, b])]
            if not live:
                flat.never = True
                return
            groups = self._overlapping(flat, live)
            choice = [branch for group in groups for branch in self._of_group(group)]
            if len(groups) == 1 and choice == [_one_of(live)] and len(live) > 1:
                exclusives.append(live)
            else:
                flat.choices.append(choice)
        flat.exclusives = exclusives

    def _overlapping(self, flat: Flat, live: list[Schema]) -> list[list[Schema]]:
        """The branches in groups: those of different groups have no value in common."""
        groups: list[list[int]] = [[index] for index in range(len(live))]
        if len(live) * (len(live) - 1) // 2 > MAX_PAIRS:
            return [live]
        for one, other in itertools.combinations(range(len(live)), 2):
            mine = next(group for group in groups if one in group)
            theirs = next(group for group in groups if other in group)
            if mine is theirs or self._is_empty([*flat.simple, live[one], live[other]]):
                continue
            mine += theirs
            groups.remove(theirs)
        return [[live[index] for index in sorted(group)] for group in groups]

    def _of_group(self, group: list[Schema]) -> list[Schema]:
        """Alternatives for "exactly one of these"."""
        if len(group) == 1:
            return group
        if len(group) <= MAX_OVERLAPPING:
            denials = [self._flattener.negate(branch) for branch in group]
            if all(denial is not None for denial in denials):
                return [self._alone(group, denials, index) for index in range(len(group))]
        return [_one_of(group)]

    def _alone(self, group: list[Schema], denials: list[Schema | None], index: int) -> Schema:
        branch = group[index]
        others = [d for other, d in enumerate(denials) if other != index and d is not None]
        origin = branch.get(ORIGIN, "") if isinstance(branch, dict) else ""
        return {ORIGIN: origin, "allOf": [branch, *others]}

    def combine(self, flat: Flat) -> list[list[Schema]]:
        """All consistent ways to take one branch of each choice; choices that are too many become opaque."""
        ways: list[list[Schema]] = [[]]
        for branches in sorted(flat.choices, key=len):
            if len(ways) * len(branches) > MAX_COMBINATIONS * 8:
                following = None
            else:
                following = [
                    [*way, branch]
                    for way in ways
                    for branch in branches
                    if not self._is_empty([*flat.simple, *way, branch])
                ]
            if following is None or len(following) > max(MAX_COMBINATIONS, len(branches)):
                flat.opaque.append({ORIGIN: "", "anyOf": branches})
            else:
                ways = following
        return ways


def _one_of(branches: list[Schema]) -> Schema:
    return {"oneOf": branches}
