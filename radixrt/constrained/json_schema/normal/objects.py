"""Normalises a conjunction of schemas for objects, down to the schemas of each property."""

import dataclasses
from typing import Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw, count_bounds
from radixrt.constrained.json_schema.normal.matching import ANYTHING, matches
from radixrt.constrained.json_schema.normal.node import Node, NodeOf
from radixrt.constrained.json_schema.normal.scalars import denied_values


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
            self._leave_only_required()
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
                if never and certain and not self._is_matched(name):
                    continue
            self.properties[name] = found
        if never and self._all_certain and all(found.is_never for found in self.patterns.values()):
            self.patterns = {}
        return True

    def _is_matched(self, name: str) -> bool:
        return any(matches(pattern, name) is not False for pattern in self.patterns)

    # Numbers of properties

    def _leave_only_required(self) -> None:
        """Allow as many properties as are required, and no other."""
        self.properties = {name: self.properties[name] for name in self.required}
        self.patterns, self.most, self.additional = {}, None, Node(self._origin, False)

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
