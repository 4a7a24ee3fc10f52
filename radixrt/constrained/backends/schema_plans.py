"""Plans the schemas of tags, and keeps each tag's plans, so that of a set of tools only those are planned that are new.

To normalise a schema and to audit it takes two to four times as long as to compile the grammar of all.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from radixrt.constrained.constraint import JsonSchema, Parameters
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.auditing.audit import plan_json_schema

KeptPlans = dict[bytes, bytes]
"""The encoded plans of each content of a tag, by :func:`content_key`."""


class SchemaPlan(msgspec.Struct, frozen=True, array_like=True):
    """How llguidance holds a value to a schema; see :class:`radixrt.constrained.json_schema.auditing.audit.JsonPlan`."""

    key: bytes
    """Digest of the schema and of the way in which it is planned."""
    schema_text: str
    """JSON, whose numbers may be of any size."""
    checks: tuple[SpanCheck, ...]
    checked: tuple[Unenforced, ...]
    unenforced: tuple[Unenforced, ...]

    @property
    def schema(self) -> Any:
        return json.loads(self.schema_text)


_decode = msgspec.msgpack.Decoder(list[SchemaPlan]).decode


def content_key(content: JsonSchema | Parameters) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class SchemaPlans:
    """The plans of one constraint.

    Args:
        kept: those of earlier constraints.

    Attributes:
        made: those that were not among them.
        num_planned: schemas that were planned.
    """

    def __init__(self, kept: Mapping[bytes, bytes]) -> None:
        self.made: KeptPlans = {}
        self.num_planned = 0
        self._kept = kept
        self._found: dict[bytes, SchemaPlan] = {}

    def begin(self, content: JsonSchema | Parameters) -> None:
        """Take the kept plans of a tag's content, whose schemas are going to be planned."""
        key = content_key(content)
        if (kept := self._kept.get(key) or self.made.get(key)) is not None:
            self._found |= {plan.key: plan for plan in _decode(kept)}

    def end(self, content: JsonSchema | Parameters) -> None:
        """Keep the plans since :meth:`begin`."""
        if (key := content_key(content)) not in self._kept:
            self.made[key] = msgspec.msgpack.encode([*self._found.values()])
        self._found.clear()

    def plan(self, schema_text: str, *, strict: bool, allow_checks: bool) -> SchemaPlan:
        """Raises:
        CannotEnforce: as :func:`plan_json_schema`.
        """
        key = hashlib.sha256(f"{strict} {allow_checks} {schema_text}".encode()).digest()
        if (found := self._found.get(key)) is not None:
            return found
        plan = plan_json_schema(schema_text, strict=strict, allow_checks=allow_checks)
        text = json.dumps(plan.schema, ensure_ascii=False)
        self.num_planned += 1
        self._found[key] = SchemaPlan(key, text, plan.checks, plan.checked, plan.unenforced)
        return self._found[key]
