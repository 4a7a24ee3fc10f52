"""Normalises a conjunction of schemas for arrays."""

from typing import Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw, count_bounds
from radixrt.constrained.json_schema.normal.node import Node, NodeOf
from radixrt.constrained.json_schema.normal.scalars import denied_values

MAX_WAYS = 8
"""Positions of the items that satisfy ``contains``, each with an alternative of its own; beyond, it
stays a keyword."""

Way = dict[int, list[Schema]]
"""What must hold of the items at some positions, in addition to their own schemas."""


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
        self.least, self.most = count_bounds(simple, "Items")
        self.prefix: list[Node] = []
        self.tail: Node | None = None

    def nodes(self) -> list[Node]:
        """Alternatives; none where no array is left."""
        denied = denied_values(self._simple, "array")
        if [] in denied:
            self.least = max(self.least, 1)
        contained = self._contained()
        self._place_items()
        if contained is None or (self.most is not None and self.least > self.most):
            return []
        words: Raw = {}
        if any(raw.get("uniqueItems") for raw in self._simple) and self.most not in (0, 1):
            words["uniqueItems"] = True
        if denied := [value for value in denied if len(value) >= self.least]:
            words["not"] = {"enum": denied}
        ways: list[Way] = [{}]
        left: list[Raw] = []
        for schema, bounds in contained:
            more = self._ways(ways, schema, bounds)
            if more is None:
                left.append({"contains": self._node_of([schema]), **bounds})
            else:
                ways = more
        if left:
            words |= left[0]
        if left[1:]:
            words["allOf"] = [{"type": "array", **each} for each in left[1:]]
        return [self._form(way, words) for way in ways]

    def _ways(self, ways: list[Way], contains: Schema, bounds: Raw) -> list[Way] | None:
        """The ways, each with an item that satisfies ``contains`` too; none if too few items can.
        None: the keyword has to stay, because the ways are too many, or are not all that it
        says."""
        least = bounds.get("minContains", 1)
        behind = len(self.prefix)
        able = [at for at in range(behind) if not self._item(at, [contains]).is_never]
        if self.tail is not None and not self._item(None, [contains]).is_never:
            most = behind + max(least, MAX_WAYS + 1) if self.most is None else self.most
            able += range(behind, min(most, behind + max(least, MAX_WAYS + 1)))
        if len(able) < least:
            return []
        if bounds or len(able) * len(ways) > MAX_WAYS:
            return None
        return [{**way, at: [*way.get(at, ()), contains]} for way in ways for at in able]

    def _item(self, index: int | None, more: list[Schema]) -> Node:
        """The item at a position of which more must hold; None: behind all prefixes."""
        return self._node_of([*item_conjuncts(self._simple, index), *more])

    def _form(self, way: Way, words: Raw) -> Node:
        """The arrays whose items satisfy their schemas and what the way adds."""
        beyond = max(way, default=-1) + 1
        prefix = [
            self._item(at, way[at])
            if at in way
            else (self.prefix[at] if at < len(self.prefix) else self._item(None, []))
            for at in range(max(len(self.prefix), beyond))
        ]
        form: dict[str, Any] = {"type": "array"}
        if prefix:
            form["prefixItems"] = prefix
        if prefix and self.most is not None and self.most <= len(prefix):
            form["items"] = Node(self._origin, False)
        else:
            if self.tail is not None and not isinstance(self.tail.schema, bool):
                form["items"] = self.tail
            if self.most is not None:
                form["maxItems"] = self.most
        if least := max(self.least, beyond):
            form["minItems"] = least
        return Node(self._origin, form | words)

    def _contained(self) -> list[tuple[Schema, Raw]] | None:
        """Each ``contains`` that has an effect, and its bounds; None if one can't be satisfied. A
        ``contains`` that any item satisfies becomes a bound on the number of items."""
        found: list[tuple[Schema, Raw]] = []
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
                bounds: Raw = {} if least == 1 else {"minContains": least}
                if most is not None:
                    bounds["maxContains"] = int(most)
                found.append((raw["contains"], bounds))
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
