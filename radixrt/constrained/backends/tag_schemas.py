"""Keeps what was found of the schemas in tags, so that of a set of tools only new ones are looked
at.

To normalise a schema and to find what is enforced of it takes two to four times as long as to
compile the grammar of all tools.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from radixrt.constrained.constraint import JsonSchema, Parameters
from radixrt.constrained.grammar import SpanCheck, Unenforced

KeptSchemas = dict[bytes, bytes]
"""The encoded :class:`TagSchema` objects of each content of a tag, by :func:`content_key`."""


class TagSchema(msgspec.Struct, frozen=True, array_like=True):
    """A schema as llguidance takes it, and what the grammar leaves; see
    :class:`radixrt.constrained.json_schema.enforcement.EnforcedSchema`."""

    key: bytes
    """Digest of the user's schema and of the options."""
    schema_text: str
    """JSON, whose numbers may be of any size."""
    checks: tuple[SpanCheck, ...]
    checked: tuple[Unenforced, ...]
    unenforced: tuple[Unenforced, ...]

    @property
    def schema(self) -> dict[str, Any]:
        schema = json.loads(self.schema_text)
        if isinstance(schema, dict):
            return schema
        return {} if schema else {"enum": []}


_decode = msgspec.msgpack.Decoder(list[TagSchema]).decode


def content_key(content: JsonSchema | Parameters) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class TagSchemas:
    """The schemas in the tags of one constraint.

    Args:
        kept: those of earlier constraints.

    Attributes:
        made: those that were not among them.
        num_made: their number.
    """

    def __init__(self, kept: Mapping[bytes, bytes]) -> None:
        self.made: KeptSchemas = {}
        self.num_made = 0
        self._kept = kept
        self._found: dict[bytes, TagSchema] = {}

    def begin(self, content: JsonSchema | Parameters) -> None:
        """Look up the content of a tag, whose schemas are asked for next."""
        key = content_key(content)
        if (kept := self._kept.get(key) or self.made.get(key)) is not None:
            self._found |= {each.key: each for each in _decode(kept)}

    def end(self, content: JsonSchema | Parameters) -> None:
        """Keep the schemas since :meth:`begin`."""
        if (key := content_key(content)) not in self._kept:
            self.made[key] = msgspec.msgpack.encode([*self._found.values()])
        self._found.clear()

    def enforce(self, schema_text: str, *, strict: bool, allow_checks: bool) -> TagSchema:
        """Raises CannotEnforce as :func:`enforce_json_schema`."""
        key = hashlib.sha256(f"{strict} {allow_checks} {schema_text}".encode()).digest()
        if (found := self._found.get(key)) is not None:
            return found
        # here: the tokenizer process, which sends jobs, needs none of it
        from radixrt.constrained.json_schema.enforcement import enforce_json_schema

        parts = enforce_json_schema(schema_text, strict=strict, allow_checks=allow_checks)
        text = json.dumps(parts.schema, ensure_ascii=False)
        self.num_made += 1
        self._found[key] = TagSchema(key, text, parts.checks, parts.checked, parts.unenforced)
        return self._found[key]
