"""A user's JSON schema in the few, plain forms that backends can be measured on."""

from radixrt.constrained.json_schema.errors import SchemaError
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.normalize import normalize, strip_origins

__all__ = ["ORIGIN", "SchemaError", "normalize", "strip_origins"]
