"""Which objects satisfy all of these schemas?"""

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

from radixrt.constrained.json_schema.keywords import ORIGIN, Schema
from radixrt.constrained.json_schema.normal.arrays import finite_values
from radixrt.constrained.json_schema.normal.flatten import Raw
from radixrt.constrained.json_schema.normal.node import Node
from radixrt.constrained.json_schema.normal.scalars import denied_values
from radixrt.constrained.json_schema.normal.values import matches

if TYPE_CHECKING:
    from radixrt.constrained.json_schema.normal.normalize import Normalizer

MAX_SUBSETS = 40
"""Sets of properties that are written out one by one where their number is bounded."""
_ANY_NAME = ("", ".*", "^.*", "^")
"""Patterns that match every name."""


@dataclasses.dataclass
class Shape:
    """The three words that divide an object's properties among themselves, each with its conjunctions."""

    properties: dict[str, list[Schema]] = dataclasses.field(default_factory=dict)
    patterns: dict[str, list[Schema]] = dataclasses.field(default_factory=dict)
    additional: list[Schema] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(raw: Raw) -> "Shape":
        shape = Shape(
            {name: [schema] for name, schema in raw.get("properties", {}).items()},
            {pattern: [schema] for pattern, schema in raw.get("patternProperties", {}).items()},
            [raw["additionalProperties"]] if raw.get("additionalProperties", True) is not True else [],
        )  # fmt: skip
        for pattern in _ANY_NAME:  # then no property is additional
            if pattern in shape.patterns:
                every = shape.patterns.pop(pattern)
                for schemas in (*shape.properties.values(), *shape.patterns.values()):
                    schemas += every
                shape.additional = list(every)
        return shape

    @property
    def closed(self) -> bool:
        return False in self.additional and not self.patterns

    def of_name(self, name: str) -> list[Schema] | None:
        """What the property of a name must satisfy; None where a pattern leaves that open."""
        found = list(self.properties.get(name, ()))
        matched = name in self.properties
        for pattern, schemas in self.patterns.items():
            verdict = matches(pattern, name)
            if verdict is None:
                return None
            if verdict:
                matched = True
                found += [schema for schema in schemas if schema not in found]
        return found if matched else list(self.additional)

    def merged(self, other: "Shape") -> "Shape | None":
        """Both at once, or None where no three words say that."""
        if not (_covers(self, other) and _covers(other, self)):
            return None
        names = list(dict.fromkeys((*self.properties, *other.properties)))
        properties: dict[str, list[Schema]] = {}
        for name in names:
            mine, theirs = self.of_name(name), other.of_name(name)
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
    """Can what ``other`` says about additional properties be said beside the patterns of ``one``?"""
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
        if not raw.keys() & {"properties", "patternProperties", "additionalProperties"}:
            continue
        _put(shapes, Shape.of(raw))
    return shapes


def _put(shapes: list[Shape], shape: Shape) -> None:
    for index, before in enumerate(shapes):
        merged = before.merged(shape)
        if merged is not None:
            shapes[index] = merged
            return
    shapes.append(shape)


def required_names(simple: list[Raw]) -> list[str]:
    return list(dict.fromkeys(name for raw in simple for name in raw.get("required", ())))


class ObjectForm:
    """The words of a conjunction about objects, put together."""

    def __init__(self, normalizer: "Normalizer", simple: list[Raw]) -> None:
        self._normalizer = normalizer
        self._simple = simple
        self._origin = simple[0].get(ORIGIN, "") if simple else ""
        self._shapes = shapes_of(simple)
        self._names_left: list[Schema] = []
        self._more: list[Any] = []
        self.required = required_names(simple)
        self.least = max((int(raw.get("minProperties", 0)) for raw in simple), default=0)
        self.most = min(
            (int(raw["maxProperties"]) for raw in simple if "maxProperties" in raw), default=None
        )
        self.properties: dict[str, Node] = {}
        self.patterns: dict[str, Node] = {}
        self.additional: Node | None = None
        self._all_certain = True

    def nodes(self) -> list[Node]:
        """Alternatives; none where no object is left."""
        self._place_names()
        shape = self._shapes[0] if self._shapes else Shape()
        if not self._place_properties(shape):
            return []
        for other in self._shapes[1:]:
            self._more.append(Node(self._origin, self._plain_shape(other)))
        if self.most is not None and len(self.required) > self.most:
            return []
        if self._closed:
            possible = len(self.properties)
            if self.least > possible:
                return []
            if self.least == possible:
                self.required = list(self.properties)
            if self.most is not None and self.most >= possible:
                self.most = None
        if self.least <= len(self.required):
            self.least = 0
        if self.most is not None and self.most == len(self.required):
            return self._only_required()
        subsets = self._subsets()
        if subsets is not None:
            return subsets
        return [Node(self._origin, self._form())]

    @property
    def _closed(self) -> bool:
        additional = self.additional
        return additional is not None and additional.is_never and not self.patterns

    # Names

    def _place_names(self) -> None:
        """Say ``propertyNames`` as a shape, where that can be done."""
        names = [raw["propertyNames"] for raw in self._simple if "propertyNames" in raw]
        if not names:
            return
        kinds: list[Schema] = [{ORIGIN: self._origin, "type": "string"}]
        node = self._normalizer.node([*names, *kinds])
        shape = self._names_as_shape(node)
        if shape is None:
            self._names_left = names
            closed = [shape for shape in self._shapes if shape.closed]
            if closed:
                self._filter_closed(closed[0], names)
        else:
            _put(self._shapes, shape)

    def _names_as_shape(self, node: Node) -> Shape | None:
        if node.is_never:
            return Shape(additional=[False])
        values = finite_values(node)
        if values is not None:
            return Shape({value: [] for value in values}, {}, [False])
        words = node.schema if isinstance(node.schema, dict) else {}
        if words.keys() == {"type"}:
            return Shape()
        if words.keys() == {"type", "pattern"}:
            return Shape({}, {words["pattern"]: []}, [False])
        if words.keys() <= {"type", "minLength", "maxLength"} and max(
            words.get("minLength", 0), words.get("maxLength", 0)
        ) <= 1000:  # fmt: skip
            sizes = f"{words.get('minLength', 0)},{words.get('maxLength', '')}"
            return Shape({}, {f"^[\\s\\S]{{{sizes}}}$": []}, [False])
        return None

    def _filter_closed(self, shape: Shape, names: list[Schema]) -> None:
        kept, certain = self._normalizer.judge.sort(list(shape.properties), names)
        if certain:
            shape.properties = {name: shape.properties[name] for name in kept}
            self._names_left = []

    # Properties

    def _place_properties(self, shape: Shape) -> bool:
        """False where a property is required that no value may have."""
        node = self._normalizer.node
        self.additional = node(shape.additional)
        never = self.additional.is_never
        self.patterns = {pattern: node(schemas) for pattern, schemas in shape.patterns.items()}
        if self.additional.is_any:
            self.patterns = {p: found for p, found in self.patterns.items() if not found.is_any}
        for name in dict.fromkeys((*shape.properties, *self.required)):
            schemas = shape.of_name(name)
            certain = schemas is not None
            if schemas is None:
                self._all_certain = False
                if name not in shape.properties:
                    continue
                schemas = shape.properties[name]
            found = node(schemas)
            if found.is_never:
                if name in self.required:
                    return False
                if never and (certain and not self._matched(name)):
                    continue
            self.properties[name] = found
        if never and self._all_certain and all(found.is_never for found in self.patterns.values()):
            self.patterns = {}
        return True

    def _matched(self, name: str) -> bool:
        return any(matches(pattern, name) is not False for pattern in self.patterns)

    def _plain_shape(self, shape: Shape) -> dict[str, Any]:
        node = self._normalizer.node
        form: dict[str, Any] = {"type": "object"}
        if shape.properties:
            form["properties"] = {name: node(found) for name, found in shape.properties.items()}
        if shape.patterns:
            form["patternProperties"] = {
                pattern: node(found) for pattern, found in shape.patterns.items()
            }
        if shape.additional:
            form["additionalProperties"] = node(shape.additional)
        return form

    # Numbers of properties

    def _only_required(self) -> list[Node]:
        """As many properties as are required, and no other."""
        properties = {name: self.properties.get(name) for name in self.required}
        if not self._all_certain or any(found is None for found in properties.values()):
            return [Node(self._origin, self._form())]
        self.properties = {name: found for name, found in properties.items() if found is not None}
        self.patterns, self.most = {}, None
        self.additional = Node(self._origin, False)
        return [Node(self._origin, self._form())]

    def _subsets(self) -> list[Node] | None:
        """The ways to choose which optional properties there are, if a bound on their number asks for it."""
        if not self._closed or not (self.least or self.most is not None):
            return None
        optional = [name for name in self.properties if name not in self.required]
        if self.least and self.most is None:
            return self._at_least(optional, self.least - len(self.required))
        assert self.most is not None
        room = self.most - len(self.required)
        if self.least:
            sizes = list(range(max(self.least - len(self.required), 0), room + 1))
            if sum(math.comb(len(optional), size) for size in sizes) > MAX_SUBSETS:
                return None
            return [
                self._with(set(self.required) | set(chosen), set())
                for size in sizes
                for chosen in itertools.combinations(optional, size)
            ]
        if room < 0:
            return []
        if math.comb(len(optional), room) > MAX_SUBSETS:
            return None
        return [
            self._with(set(self.required), set(chosen))
            for chosen in itertools.combinations(optional, room)
        ]

    def _at_least(self, optional: list[str], count: int) -> list[Node] | None:
        """Disjoint: the first ``count`` properties that are there, and any of those that follow."""
        if math.comb(len(optional), count) > MAX_SUBSETS:
            return None
        ways = []
        for chosen in itertools.combinations(optional, count):
            later = optional[optional.index(chosen[-1]) + 1 :]
            ways.append(self._with(set(self.required) | set(chosen), set(later)))
        return ways

    def _with(self, required: set[str], optional: set[str]) -> Node:
        form = self._form()
        kept = {
            name: found
            for name, found in self.properties.items()
            if name in required or name in optional
        }
        for word in ("minProperties", "maxProperties", "required"):
            form.pop(word, None)
        form.pop("properties", None)
        words: dict[str, Any] = {"type": "object"}
        if kept:
            words["properties"] = kept
        if required:
            words["required"] = [name for name in kept if name in required]
        form.pop("type")
        return Node(self._origin, {**words, **form})

    def _form(self) -> dict[str, Any]:
        form: dict[str, Any] = {"type": "object"}
        if self.properties:
            form["properties"] = self.properties
        if self.patterns:
            form["patternProperties"] = self.patterns
        if self.additional is not None and not self.additional.is_any:
            form["additionalProperties"] = self.additional
        if self.required:
            order = list(self.properties)
            undeclared = [name for name in self.required if name not in self.properties]
            declared = [name for name in order if name in set(self.required)]
            form["required"] = declared + undeclared
        if self.least:
            form["minProperties"] = self.least
        if self.most is not None:
            form["maxProperties"] = self.most
        more = list(self._more)
        for schema in self._names_left:
            node = self._normalizer.node([schema])
            if "propertyNames" in form:
                more.append(Node(self._origin, {"type": "object", "propertyNames": node}))
            else:
                form["propertyNames"] = node
        denied = denied_values(self._simple, "object")
        if denied:
            form["not"] = {"enum": denied}
        if more:
            form["allOf"] = more
        return form
