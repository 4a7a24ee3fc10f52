"""Normalises a conjunction of schemas for arrays."""

from typing import Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw
from radixrt.constrained.json_schema.normal.node import Node, NodeOf
from radixrt.constrained.json_schema.normal.scalars import denied_values


def item_conjuncts(simple: list[Raw], index: int | None) -> list[Schema]:
    """The schemas of the item at a position; None: of every item after all prefixes."""
    found: list[Schema] = []
    for raw in simple:
        prefix = raw.get("prefixItems", ())
        if index is not None and index < len(prefix):
            found.append(prefix[index])
        elif "items" in raw:
            found.append(raw["items"])
    return found


def longest_prefix(simple: list[Raw]) -> int:
    """Positions that may have a schema of their own."""
    return max((len(raw.get("prefixItems", ())) for raw in simple), default=0)


class ArrayForm:
    """The array keywords of a conjunction, combined."""

    def __init__(self, node_of: NodeOf, simple: list[Raw]) -> None:
        self._node_of = node_of
        self._simple = simple
        self._origin = simple[0].get(ORIGIN, "") if simple else ""
        self.least = max((int(raw.get("minItems", 0)) for raw in simple), default=0)
        self.most = min((int(raw["maxItems"]) for raw in simple if "maxItems" in raw), default=None)
        self.prefix: list[Node] = []
        self.tail: Node | None = None

    def nodes(self) -> list[Node]:
        """Alternatives; none where no array is left."""
        contained = self._contained()
        self._place_items()
        if contained is None or (self.most is not None and self.least > self.most):
            return []
        form: dict[str, Any] = {"type": "array"}
        if self.prefix:
            form["prefixItems"] = self.prefix
        if self.prefix and self.most is not None and self.most <= len(self.prefix):
            form["items"] = Node(self._origin, False)
        else:
            if self.tail is not None and not isinstance(self.tail.schema, bool):
                form["items"] = self.tail
            if self.most is not None:
                form["maxItems"] = self.most
        if self.least:
            form["minItems"] = self.least
        denied = denied_values(self._simple, "array")
        if any(raw.get("uniqueItems") for raw in self._simple) and self.most not in (0, 1):
            form["uniqueItems"] = True
        if denied:
            form["not"] = {"enum": denied}
        if contained:
            form |= contained[0]
        if contained[1:]:
            form["allOf"] = [{"type": "array", **words} for words in contained[1:]]
        return [Node(self._origin, form)]

    def _contained(self) -> list[Raw] | None:
        """The keywords of each ``contains`` that has an effect; None if one can't be satisfied. A ``contains`` that any
        item satisfies becomes a bound on the number of items."""
        found: list[Raw] = []
        for raw in self._simple:
            if "contains" not in raw:
                continue
            least, most = int(raw.get("minContains", 1)), raw.get("maxContains")
            node = self._node_of([raw["contains"]])
            if (node.is_never and least > 0) or (most is not None and most < least):
                return None
            if node.is_any:
                self.least = max(self.least, least)
                self.most = min((int(m) for m in (self.most, most) if m is not None), default=None)
            elif not node.is_never and (least > 0 or most is not None):
                words: Raw = {"contains": node}
                if least != 1:
                    words["minContains"] = least
                if most is not None:
                    words["maxContains"] = int(most)
                found.append(words)
        return found

    def _place_items(self) -> None:
        for index in range(longest_prefix(self._simple)):
            if self.most is not None and index >= self.most:
                break
            node = self._node_of(item_conjuncts(self._simple, index))
            if node.is_never:
                self.most = index
                break
            self.prefix.append(node)
        if self.most is None or self.most > len(self.prefix):
            self.tail = self._node_of(item_conjuncts(self._simple, None))
            if self.tail.is_never:
                self.most = len(self.prefix)
