"""Which arrays satisfy all of these schemas?"""

import itertools
from typing import TYPE_CHECKING, Any

from radixrt.constrained.json_schema.keywords import NOT_IN, ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw
from radixrt.constrained.json_schema.normal.node import Node
from radixrt.constrained.json_schema.normal.scalars import denied_values
from radixrt.constrained.json_schema.normal.values import value_key

if TYPE_CHECKING:
    from radixrt.constrained.json_schema.normal.normalize import Normalizer

MAX_SEQUENCES = 130
"""Arrays of distinct items that are written out one by one."""
MAX_PREFIX = 200
"""Positions with a schema of their own that are still told apart."""


def item_conjuncts(simple: list[Raw], index: int | None) -> list[Schema]:
    """What the item at a position must satisfy; None: every item after all prefixes."""
    found: list[Schema] = []
    for raw in simple:
        prefix = raw.get("prefixItems", ())
        if index is not None and index < len(prefix):
            found.append(prefix[index])
        elif "items" in raw:
            found.append(raw["items"])
    return found


class ArrayForm:
    """The words of a conjunction about arrays, put together."""

    def __init__(self, normalizer: "Normalizer", simple: list[Raw]) -> None:
        self._normalizer = normalizer
        self._simple = simple
        self._origin = simple[0].get(ORIGIN, "") if simple else ""
        self.least = max((int(raw.get("minItems", 0)) for raw in simple), default=0)
        self.most = min((int(raw["maxItems"]) for raw in simple if "maxItems" in raw), default=None)
        self.prefix: list[Node] = []
        self.tail: Node | None = None

    def nodes(self) -> list[Node]:
        """Alternatives; none where no array is left."""
        self._place_items()
        if self.most is not None and self.least > self.most:
            return []
        form: dict[str, Any] = {"type": "array"}
        if self.prefix:
            form["prefixItems"] = self.prefix
        if self.most is not None and self.most <= len(self.prefix):
            if self.prefix:
                form["items"] = Node(self._origin, False)
            else:
                form["maxItems"] = 0
        else:
            if self.tail is not None and not self.tail.is_any:
                form["items"] = self.tail
            if self.most is not None:
                form["maxItems"] = self.most
        if self.least:
            form["minItems"] = self.least
        more: list[Node] = []
        for contained in self._contains():
            if contained is None:
                return []
            more.append(contained)
        if any(raw.get("uniqueItems") for raw in self._simple) and self.most not in (0, 1):
            sequences = self._distinct_sequences()
            if sequences is not None and not more and not denied_values(self._simple, "array"):
                return sequences
            if not self._are_apart():
                form["uniqueItems"] = True
        denied = denied_values(self._simple, "array")
        if denied:
            form["not"] = {"enum": denied}
        if more:
            form.update(self._absorb(form, more))
        return [Node(self._origin, form)]

    def _place_items(self) -> None:
        length = max((len(raw.get("prefixItems", ())) for raw in self._simple), default=0)
        for index in range(length):
            if self.most is not None and index >= self.most:
                break
            node = self._normalizer.node(item_conjuncts(self._simple, index))
            if node.is_never:
                self.most = index
                break
            self.prefix.append(node)
        if self.most is None or self.most > len(self.prefix):
            self.tail = self._normalizer.node(item_conjuncts(self._simple, None))
            if self.tail.is_never:
                self.most = len(self.prefix)

    def _contains(self) -> list[Node | None]:
        """Nodes with a ``contains`` each, where it says something; None where it can't be satisfied."""
        found: list[Node | None] = []
        for raw in self._simple:
            if "contains" not in raw:
                continue
            least, most = int(raw.get("minContains", 1)), raw.get("maxContains")
            node = self._normalizer.node([raw["contains"]])
            if (node.is_never and least > 0) or (most is not None and most < least):
                return [None]
            if node.is_never or (least == 0 and most is None):
                continue
            if node.is_any:
                if most is None and least <= self.least:
                    continue
                found.append(self._sized(raw, least, most))
                continue
            words: dict[str, Any] = {"type": "array", "contains": node}
            if least != 1:
                words["minContains"] = least
            if most is not None:
                words["maxContains"] = int(most)
            found.append(Node(raw.get(ORIGIN, ""), words))
        return found

    def _sized(self, raw: Raw, least: int, most: Any) -> Node:
        words: dict[str, Any] = {"type": "array", "minItems": least}
        if most is not None:
            words["maxItems"] = int(most)
        return Node(raw.get(ORIGIN, ""), words)

    def _absorb(self, form: dict[str, Any], more: list[Node]) -> dict[str, Any]:
        """The first ``contains`` stands in the form itself, the others in ``allOf``."""
        first = more[0].schema
        assert isinstance(first, dict)
        if "contains" in first:
            rest = more[1:]
            words = {word: value for word, value in first.items() if word != "type"}
            return {**words, "allOf": rest} if rest else words
        return {"allOf": more}

    def _are_apart(self) -> bool:
        """Are all items different because their positions' schemas have no value in common?"""
        if self.most is None or self.most > len(self.prefix) or len(self.prefix) > 10:
            return False
        schemas = [item_conjuncts(self._simple, index) for index in range(len(self.prefix))]
        return all(
            self._normalizer.is_empty([*one, *other])
            for one, other in itertools.combinations(schemas, 2)
        )

    def _distinct_sequences(self) -> list[Node] | None:
        """Every array of distinct items, where these are few."""
        if self.prefix or self.tail is None:
            return None
        values = finite_values(self.tail)
        if values is None:
            return None
        most = len(values) if self.most is None else min(self.most, len(values))
        if self.least > most:
            return []
        if _arrangements(len(values), self.least, most) > MAX_SEQUENCES:
            return None
        sequences = [
            list(sequence)
            for count in range(self.least, most + 1)
            for sequence in itertools.permutations(values, count)
        ]
        return [Node(self._origin, {"enum": sequences})]


def _arrangements(count: int, least: int, most: int) -> int:
    total, ways = 0, 1
    for length in range(most + 1):
        total += ways if length >= least else 0
        ways *= count - length
        if total > MAX_SEQUENCES:
            break
    return total


def finite_values(node: Node) -> list[Any] | None:
    """All values of a node, if it is written as a list of them."""
    if not isinstance(node.schema, dict):
        return None
    if node.schema.keys() == {"anyOf"}:
        parts = [finite_values(part) for part in node.schema["anyOf"]]
        if any(part is None for part in parts):
            return None
        values = [value for part in parts if part is not None for value in part]
        return list({value_key(value): value for value in values}.values())
    if node.schema.keys() <= {"enum", "const", NOT_IN}:
        return node.schema.get("enum", [node.schema.get("const")])
    if node.schema == {"type": "boolean"}:
        return [False, True]
    return [None] if node.schema == {"type": "null"} else None
