"""Lists the combinations of branches of ``anyOf`` and ``oneOf`` that a value can satisfy."""

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
        """Turn ``oneOf`` into choices and drop denials that can't be met, if certain."""
        opaque = []
        for raw in flat.opaque:
            if "not" in raw and self._is_empty([*flat.simple, raw["not"]]):
                continue
            if "if" in raw and self._is_empty([*flat.simple, raw["if"]]):
                flat.choices.append([raw.get("else", True)])
                continue
            opaque.append(raw)
        flat.opaque = opaque
        exclusives, flat.exclusives = flat.exclusives, []
        for branches in exclusives:
            live = [b for b in branches if not self._is_empty([*flat.simple, b])]
            groups = self._overlapping(flat, live)
            ways = [self._of_group(group) for group in groups]
            if len(groups) == 1 and ways[0] == [{"oneOf": groups[0]}]:
                flat.exclusives += groups
            else:
                flat.choices.append([way for each in ways for way in each])

    def _overlapping(self, flat: Flat, live: list[Schema]) -> list[list[Schema]]:
        """The branches in groups: those of different groups have no value in common."""
        if len(live) * (len(live) - 1) // 2 > MAX_PAIRS:
            return [live]
        groups: list[list[Schema]] = []
        for branch in live:
            apart: list[list[Schema]] = []
            merged: list[Schema] = []
            for group in groups:
                is_apart = all(self._is_empty([*flat.simple, other, branch]) for other in group)
                if is_apart:
                    apart.append(group)
                else:
                    merged += group
            groups = [*apart, [*merged, branch]]
        return groups

    def _of_group(self, group: list[Schema]) -> list[Schema]:
        """Alternatives for "exactly one of these"."""
        if len(group) == 1:
            return group
        denials = (
            [self._flattener.negate(b) for b in group] if len(group) <= MAX_OVERLAPPING else [None]
        )
        if None in denials:
            return [{"oneOf": group}]
        return [
            {
                ORIGIN: branch.get(ORIGIN, "") if isinstance(branch, dict) else "",
                "allOf": [branch, *denials[:index], *denials[index + 1 :]],
            }
            for index, branch in enumerate(group)
        ]

    def combine(self, flat: Flat) -> list[list[Schema]]:
        """All consistent ways to take a branch of each choice; too many choices become opaque."""
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
