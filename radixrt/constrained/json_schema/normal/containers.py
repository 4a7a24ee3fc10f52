"""Normalises a conjunction of schemas for arrays, and for objects down to the schemas of each property."""

import dataclasses
from typing import Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw, count_bounds
from radixrt.constrained.json_schema.normal.node import Node, NodeOf
from radixrt.constrained.json_schema.normal.scalars import denied_values
from radixrt.constrained.json_schema.patterns import ANYTHING, matches

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


@dataclasses.dataclass
class Shape:
    """The keywords that divide an object's properties among themselves, as conjunctions."""

    properties: dict[str, list[Schema]] = dataclasses.field(default_factory=dict)
    patterns: dict[str, list[Schema]] = dataclasses.field(default_factory=dict)
    additional: list[Schema] = dataclasses.field(default_factory=list)

    @staticmethod
    def from_schema(raw: Raw) -> "Shape":
        shape = Shape(
            {name: [schema] for name, schema in raw.get("properties", {}).items()},
            {pattern: [schema] for pattern, schema in raw.get("patternProperties", {}).items()},
            [raw["additionalProperties"]] if raw.get("additionalProperties", True) is not True else [],
        )  # fmt: skip
        for pattern in ANYTHING:  # then no property is additional
            if pattern in shape.patterns:
                every = shape.patterns.pop(pattern)
                for schemas in (*shape.properties.values(), *shape.patterns.values()):
                    schemas += every
                shape.additional = list(every)
        return shape

    @property
    def closed(self) -> bool:
        return False in self.additional and not self.patterns

    def schemas_of(self, name: str) -> list[Schema] | None:
        """The schemas of the property of a name; None where a pattern leaves that open."""
        found = list(self.properties.get(name, ()))
        matched = name in self.properties
        for pattern, schemas in self.patterns.items():
            is_match = matches(pattern, name)
            if is_match is None:
                return None
            if is_match:
                matched = True
                found += [schema for schema in schemas if schema not in found]
        return found if matched else list(self.additional)

    def merged(self, other: "Shape") -> "Shape | None":
        """The conjunction of both; None where the three keywords can't express it."""
        if not (_covers(self, other) and _covers(other, self)):
            return None
        properties: dict[str, list[Schema]] = {}
        for name in dict.fromkeys((*self.properties, *other.properties)):
            mine, theirs = self.schemas_of(name), other.schemas_of(name)
            if mine is None or theirs is None:
                return None
            properties[name] = mine + theirs
        patterns: dict[str, list[Schema]] = {}
        if not (self.closed or other.closed):
            for pattern in dict.fromkeys((*self.patterns, *other.patterns)):
                patterns[pattern] = [
                    *self.patterns.get(pattern, self.additional),
                    *other.patterns.get(pattern, other.additional),
                ]
        return Shape(properties, patterns, self.additional + other.additional)


def _covers(one: Shape, other: Shape) -> bool:
    """Whether ``other``'s schema of additional properties can stand beside ``one``'s patterns."""
    if not other.additional or other.closed or one.patterns.keys() <= other.patterns.keys():
        return True
    # Names that match a pattern of ``one`` are additional for ``other``, unless it declares them.
    return not other.patterns and not any(
        matches(pattern, name) is not False for pattern in one.patterns for name in other.properties
    )


def shapes_of(simple: list[Raw]) -> list[Shape]:
    """One shape where they can be merged, else several that must all hold."""
    shapes: list[Shape] = []
    for raw in simple:
        if raw.keys() & {"properties", "patternProperties", "additionalProperties"}:
            add_shape(shapes, Shape.from_schema(raw))
    return shapes


def add_shape(shapes: list[Shape], shape: Shape) -> None:
    """Merge a shape with the first that it can be merged with."""
    for index, before in enumerate(shapes):
        merged = before.merged(shape)
        if merged is not None:
            shapes[index] = merged
            return
    shapes.append(shape)


def required_names(simple: list[Raw]) -> list[str]:
    return list(dict.fromkeys(name for raw in simple for name in raw.get("required", ())))


class ObjectForm:
    """The object keywords of a conjunction, combined."""

    def __init__(self, node_of: NodeOf, simple: list[Raw]) -> None:
        self._node_of = node_of
        self._simple = simple
        self._origin = simple[0].get(ORIGIN, "") if simple else ""
        self._shapes = shapes_of(simple)
        self._names_left: list[Schema] = []
        self.required = required_names(simple)
        self.least, self.most = count_bounds(simple, "Properties")
        self.properties: dict[str, Node] = {}
        self.patterns: dict[str, Node] = {}
        self.additional = Node("", True)
        self._all_certain = True

    def nodes(self) -> list[Node]:
        """Alternatives; none where no object is left."""
        self._place_names()
        if not self._place_properties(self._shapes[0] if self._shapes else Shape()):
            return []
        if self.most is not None and len(self.required) > self.most:
            return []
        is_closed = self.additional.is_never and not self.patterns
        if is_closed and self.least >= len(self.properties):
            if self.least > len(self.properties):
                return []
            self.required = list(self.properties)
        if self.least <= len(self.required):
            self.least = 0
        if self.most == len(self.required) and self._all_certain:
            self.properties = {name: self.properties[name] for name in self.required}
            self.patterns, self.most, self.additional = {}, None, Node(self._origin, False)
        if is_closed and self.most is not None and self.most >= len(self.properties):
            self.most = None
        return [Node(self._origin, self._form())]

    # Names

    def _place_names(self) -> None:
        """Say ``propertyNames`` as a shape, where that can be done."""
        names = [raw["propertyNames"] for raw in self._simple if "propertyNames" in raw]
        if not names:
            return
        node = self._node_of([*names, {ORIGIN: self._origin, "type": "string"}])
        shape = _names_as_shape(node)
        if shape is not None:
            add_shape(self._shapes, shape)
            return
        self._names_left = names

    # Properties

    def _place_properties(self, shape: Shape) -> bool:
        """False where a property is required that no value may have."""
        self.additional = self._node_of(shape.additional)
        never = self.additional.is_never
        patterns = {pattern: self._node_of(found) for pattern, found in shape.patterns.items()}
        self.patterns = {
            pattern: node
            for pattern, node in patterns.items()
            if not (self.additional.is_any and node.is_any)
        }
        for name in dict.fromkeys((*shape.properties, *self.required)):
            schemas = shape.schemas_of(name)
            certain = schemas is not None
            if schemas is None:
                self._all_certain = False
                if name not in shape.properties:
                    continue
                schemas = shape.properties[name]
            found = self._node_of(schemas)
            if found.is_never:
                if name in self.required:
                    return False
                matched = any(matches(pattern, name) is not False for pattern in self.patterns)
                if never and certain and not matched:
                    continue
            self.properties[name] = found
        if never and self._all_certain and all(found.is_never for found in self.patterns.values()):
            self.patterns = {}
        return True

    # Words

    def _form(self) -> dict[str, Any]:
        form: dict[str, Any] = {"type": "object"}
        if self.properties:
            form["properties"] = self.properties
        if self.patterns:
            form["patternProperties"] = self.patterns
        if not self.additional.is_any:
            form["additionalProperties"] = self.additional
        if self.required:
            declared = [name for name in self.properties if name in set(self.required)]
            form["required"] = list(dict.fromkeys([*declared, *self.required]))
        if self.least:
            form["minProperties"] = self.least
        if self.most is not None:
            form["maxProperties"] = self.most
        more = [self._plain_shape(shape) for shape in self._shapes[1:]]
        names = [self._node_of([schema]) for schema in self._names_left]
        if names:
            form["propertyNames"] = names[0]
            more += [{"type": "object", "propertyNames": node} for node in names[1:]]
        denied = denied_values(self._simple, "object")
        if denied := [value for value in denied if value.keys() >= set(form.get("required", ()))]:
            form["not"] = {"enum": denied}
        if more:
            form["allOf"] = [Node(self._origin, words) for words in more]
        return form

    def _plain_shape(self, shape: Shape) -> dict[str, Any]:
        words = {
            "properties": {name: self._node_of(found) for name, found in shape.properties.items()},
            "patternProperties": {p: self._node_of(found) for p, found in shape.patterns.items()},
            "additionalProperties": shape.additional and self._node_of(shape.additional),
        }
        return {"type": "object", **{word: value for word, value in words.items() if value}}


def _names_as_shape(node: Node) -> Shape | None:
    """The properties whose names satisfy a schema; None where no shape says that."""
    values = node.finite_values()
    if values is not None:
        return Shape({value: [] for value in values}, {}, [False])
    words = node.schema if isinstance(node.schema, dict) else {}
    if words.keys() == {"type"}:
        return Shape()
    if words.keys() == {"type", "pattern"}:
        return Shape({}, {words["pattern"]: []}, [False])
    least, most = words.get("minLength", 0), words.get("maxLength", "")
    if words.keys() <= {"type", "minLength", "maxLength"} and max(least, most or 0) <= 1000:
        return Shape({}, {f"^[\\s\\S]{{{least},{most}}}$": []}, [False])
    return None
