"""Finds references that lead back to themselves without a step into the value."""

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import IN_PLACE, ORIGIN, Schema
from radixrt.constrained.json_schema.normal.translate import Translator
from radixrt.constrained.json_schema.walk import children


def check_progress(translator: Translator) -> None:
    """Look at all that can be reached from the root.

    Raises:
        CannotEnforce: a reference does not resolve, or a loop of references takes no step into the value.
    """
    finished: set[int] = set()
    inner: list[Schema] = [translator.at("")]

    def visit(schema: Schema, around: frozenset[int]) -> None:
        if isinstance(schema, bool) or id(schema) in finished:
            return
        if id(schema) in around:
            reason = "References lead back to this schema without a step into the value."
            raise CannotEnforce("$ref", schema.get(ORIGIN, ""), reason)
        below = around | {id(schema)}
        if "$ref" in schema:
            visit(translator.at(schema["$ref"][1:]), below)
        for path, child in children(schema):
            if path[0] in (*IN_PLACE, "dependentSchemas"):
                visit(child, below)
            else:
                inner.append(child)
        finished.add(id(schema))

    while inner:
        visit(inner.pop(), frozenset())
