"""Does a finished text satisfy its schema? The last word on an answer, in sentences."""

import functools
import json

from radixrt.constrained.json_schema.validation import SchemaValidator

MAX_ERROR_CHARS = 300


def errors_of(schema: str, text: str) -> list[str]:
    """Why a text is not valid under a schema (2020-12, JSON text, self-contained); empty if it is.

    Raises:
        Exception: the schema is none, or refers to something outside itself.
    """
    try:
        error = _validator(schema).first_error(text)
    except ValueError as reason:
        return [f"The text is not JSON: {reason}."]
    if error is None:
        return []
    where = "".join(f"/{step}" for step in error.absolute_path) or "the root"
    message = error.message
    if len(message) > MAX_ERROR_CHARS:
        message = message[:MAX_ERROR_CHARS] + "..."
    return [f"At {where}, {error.validator}: {message}."]


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> SchemaValidator:
    return SchemaValidator(json.loads(schema))
