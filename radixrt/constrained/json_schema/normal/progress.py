"""Does every reference lead somewhere, or do some only lead back to themselves?"""

from collections.abc import Iterator

from radixrt.constrained.json_schema.errors import SchemaError
from radixrt.constrained.json_schema.keywords import (
    LIST_WORDS,
    MAP_WORDS,
    ORIGIN,
    SCHEMA_WORDS,
    Schema,
)
from radixrt.constrained.json_schema.normal.translate import Translator

_SAME_VALUE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}


def check_progress(translator: Translator) -> None:
    """Look at all that can be reached from the root.

    Raises:
        SchemaError: a reference does not resolve, or a loop of references takes no step into the value.
    """
    finished: set[int] = set()
    roots: list[Schema] = [translator.at("")]
    while roots:
        root = roots.pop()
        if isinstance(root, bool) or id(root) in finished:
            continue
        stack = [(root, _edges(translator, root, roots))]
        open_ids = {id(root)}
        while stack:
            schema, edges = stack[-1]
            following = next(edges, None)
            if following is None:
                stack.pop()
                open_ids.discard(id(schema))
                finished.add(id(schema))
            elif isinstance(following, dict) and id(following) in open_ids:
                pointer = following.get(ORIGIN, "")
                raise SchemaError(
                    "$ref", pointer, "References lead back to this schema without a step into the value."
                )  # fmt: skip
            elif isinstance(following, dict) and id(following) not in finished:
                open_ids.add(id(following))
                stack.append((following, _edges(translator, following, roots)))


def _edges(translator: Translator, schema: Schema, roots: list[Schema]) -> Iterator[Schema]:
    """Schemas of the same value; those of the values inside are added to ``roots``."""
    if isinstance(schema, bool):
        return
    for word, value in schema.items():
        if word == "$ref":
            yield translator.at(value[1:])
            continue
        if word in SCHEMA_WORDS:
            found = [value]
        elif word in LIST_WORDS:
            found = value
        elif word in MAP_WORDS:
            found = list(value.values())
        else:
            continue
        if word in _SAME_VALUE:
            yield from found
        else:
            roots.extend(found)
