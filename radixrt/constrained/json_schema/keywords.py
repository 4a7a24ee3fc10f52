"""The keywords of JSON schema: the type of value that each constrains, and its subschemas."""

from typing import Any

ORIGIN = "$origin"
"""Private key of a normalised schema: JSON pointer, into the user's schema, of its origin."""
PLACE = "$place"
"""Private key of a schema that is made smaller: where each subschema was."""
NOT_IN = "$notIn"
"""Private key of the normaliser: the value is none of these (``not: {enum: ...}``)."""
NOT_INTEGER = "$notInteger"
"""Private key of the normaliser: the number has a fraction (``not: {type: integer}``)."""

TYPES = ("null", "boolean", "object", "array", "number", "string")
"""Every JSON value has exactly one of these; an integer is a number."""

OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", NOT_INTEGER,
    ),
    "array": (
        "prefixItems", "items", "minItems", "maxItems", "contains", "minContains", "maxContains", "uniqueItems",
        "unevaluatedItems",
    ),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
    ),
}  # fmt: skip
"""Keywords that say something about values of one type and nothing about others; uses of several
are named in this order."""

TYPE_OF = {keyword: kind for kind, words in OF_TYPE.items() for keyword in words}
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref")
"""Keywords that hold the same value to other schemas."""
ANY_TYPE = ("type", "enum", "const", NOT_IN)

SCHEMA_WORDS = (
    "items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "not", "if", "then", "else",
)  # fmt: skip
"""Keywords whose value is a schema, ..."""
LIST_WORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""... a list of schemas, ..."""
MAP_WORDS = ("properties", "patternProperties", "dependentSchemas")
"""... schemas by name."""

Schema = dict[str, Any] | bool
