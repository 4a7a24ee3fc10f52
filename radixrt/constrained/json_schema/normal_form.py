"""A stand-in for the normaliser: a schema with its origins noted and nothing else changed."""

import json
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.features import ORIGIN
from radixrt.constrained.json_schema.walk import Place, children, pointer_of


def normal_form(schema_text: str, draft: str | None = None) -> Any:
    """The normalised schema.

    Raises:
        CannotEnforce: the text is no schema.
    """
    try:
        schema = json.loads(schema_text)
    except ValueError as error:
        raise CannotEnforce("schema", "", f"it is no JSON: {error}.") from error
    if "definitions" in schema and "$defs" not in schema:
        schema = json.loads(
            schema_text.replace('"definitions"', '"$defs"').replace("#/definitions/", "#/$defs/")
        )
    _note(schema, ())
    return schema


def _note(node: Any, place: Place) -> None:
    if not isinstance(node, dict):
        return
    for _, path, child in list(children(node)):
        _note(child, place + path)
    for name, child in node.get("$defs", {}).items():
        _note(child, (*place, "$defs", name))
    node[ORIGIN] = pointer_of(place)
