"""What is a schema that a user sent as text, in the normal form? With refusals as those of the audit."""

import json
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.errors import SchemaError
from radixrt.constrained.json_schema.normal.normalize import normalize


def normal_form(schema_text: str, draft: str | None = None) -> Any:
    """The normalised schema, every subschema with its origin.

    Raises:
        CannotEnforce: the text is no schema, a reference leads out of it, or no value satisfies it.
    """
    try:
        schema = json.loads(schema_text)
    except (ValueError, RecursionError) as error:
        raise CannotEnforce("schema", "", f"it is no JSON that can be read: {error}.") from error
    if not _is_text(schema):
        raise CannotEnforce("schema", "", "it holds half of a surrogate pair, which no text can.")
    try:
        return normalize(schema, draft=draft)
    except SchemaError as error:
        raise CannotEnforce(error.keyword, error.pointer, error.reason) from error


def _is_text(schema: Any) -> bool:
    """Whether all strings in it can be written in UTF-8: JSON's escapes allow for others."""
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except RecursionError:
        return True  # normalising refuses such depth
    return True
