"""Resolves ``properties``, ``patternProperties`` and ``additionalProperties`` to the schemas of one property name."""

import dataclasses

from radixrt.constrained.json_schema.keywords import Schema
from radixrt.constrained.json_schema.normal.flatten import Raw
from radixrt.constrained.json_schema.normal.matching import ANYTHING, matches


@dataclasses.dataclass
class Shape:
    """The three keywords that divide an object's properties among themselves, each with its conjunctions."""

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

    def of_name(self, name: str) -> list[Schema] | None:
        """The schemas of the property of a name; None where a pattern leaves that open."""
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
        """The conjunction of both; None where the three keywords can't express it."""
        if not (_covers(self, other) and _covers(other, self)):
            return None
        properties: dict[str, list[Schema]] = {}
        for name in dict.fromkeys((*self.properties, *other.properties)):
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
    """Whether the schema of ``other`` for additional properties can stand beside the patterns of ``one``."""
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
            add_shape(shapes, Shape.of(raw))
    return shapes


def add_shape(shapes: list[Shape], shape: Shape) -> None:
    """Merge a shape with the first that it can be merged with."""
    for index, before in enumerate(shapes):
        merged = before.merged(shape)
        if merged is not None:
            shapes[index] = merged
            return
    shapes.append(shape)
