"""Normalises a conjunction of schemas for objects."""

from typing import Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.flatten import Raw
from radixrt.constrained.json_schema.normal.matching import matches
from radixrt.constrained.json_schema.normal.node import Node, NodeOf
from radixrt.constrained.json_schema.normal.scalars import denied_values
from radixrt.constrained.json_schema.normal.shapes import Shape, add_shape, shapes_of


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
        self.least = max((int(raw.get("minProperties", 0)) for raw in simple), default=0)
        self.most = min(
            (int(raw["maxProperties"]) for raw in simple if "maxProperties" in raw), default=None
        )
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
            schemas = shape.of_name(name)
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
        """As many properties as are required, and no other."""
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
    """Which properties there may be if their names satisfy a schema; None where no shape says that."""
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
