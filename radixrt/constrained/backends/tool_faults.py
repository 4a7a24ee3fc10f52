"""Finds the tool, and the parameter, for which the grammar of all tools does not compile."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from radixrt.constrained.constraint import Constraint, JsonSchema, Parameters, StructuralTag, Tag
from radixrt.constrained.json_schema.walk import pointer_of

replace = msgspec.structs.replace


def place_of_fault(constraint: Constraint, compiles: Callable[[StructuralTag], bool]) -> str:
    """The beginning of an error: the first tool that does not compile alone, with the JSON pointer of the first such property of its
    parameters; empty if each tool compiles alone.

    Args:
        compiles: tells whether a constraint does.
    """
    if not isinstance(constraint, StructuralTag):
        return ""
    for tag in constraint.tags:
        if tag.tool and not compiles(_with(constraint, tag)):
            for pointer, part in _properties(tag):
                if not compiles(_with(constraint, part)):
                    return f"In the tool {tag.tool!r} at {pointer}: "
            return f"In the tool {tag.tool!r}: "
    return ""


def _with(constraint: StructuralTag, tag: Tag) -> StructuralTag:
    """The constraint with one tag alone."""
    triggers = tuple(one for one in constraint.triggers if tag.begin.startswith(one))
    return replace(constraint, tags=(tag,), triggers=triggers or constraint.triggers)


def _properties(tag: Tag) -> Iterator[tuple[str, Tag]]:
    """For each property of the parameters, its pointer, and the tag with this property alone."""
    content = tag.content
    if not isinstance(content, JsonSchema | Parameters):
        return
    schema = content if isinstance(content, JsonSchema) else content.schema
    given: Any = json.loads(schema.schema)
    properties = given.get("properties") if isinstance(given, dict) else None
    for name, value in properties.items() if isinstance(properties, dict) else ():
        others = {key: given[key] for key in given if key not in ("properties", "required")}
        alone = replace(schema, schema=json.dumps({**others, "properties": {name: value}}))
        part = alone if isinstance(content, JsonSchema) else replace(content, schema=alone)
        yield pointer_of(("properties", name)), replace(tag, content=part)
