"""The nodes of a normalised schema while it is built."""

import dataclasses
from collections.abc import Callable
from typing import Any

from radixrt.constrained.json_schema.keywords import Schema
from radixrt.constrained.json_schema.values import distinct


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """One normalised schema, shared by all that hold it.

    Where a keyword holds a schema, the dictionary holds a node.
    """

    origin: str
    schema: dict[str, Any] | bool | None = None
    """None until it is known: nodes that refer to themselves see None."""

    def __repr__(self) -> str:
        """Its identity: equal conjunctions share a node."""
        return str(self.schema) if isinstance(self.schema, bool) else f"<{id(self):x}>"

    @property
    def is_never(self) -> bool:
        return self.schema is False

    @property
    def is_any(self) -> bool:
        return self.schema is True

    def alternatives(self) -> list["Node"]:
        """The nodes of which this is the union."""
        if self.is_never:
            return []
        if isinstance(self.schema, dict) and self.schema.keys() == {"anyOf"}:
            nodes: list[Node] = self.schema["anyOf"]
            return nodes
        return [self]

    def finite_values(self) -> list[Any] | None:
        """All its values, if it is written as a list of them."""
        found: list[Any] = []
        for part in self.alternatives():
            if not isinstance(part.schema, dict):
                return None
            if part.schema.keys() == {"enum"}:
                found += part.schema["enum"]
            elif part.schema.keys() == {"const"}:
                found.append(part.schema["const"])
            elif part.schema == {"type": "boolean"}:
                found += [False, True]
            elif part.schema == {"type": "null"}:
                found.append(None)
            else:
                return None
        return distinct(found)


NodeOf = Callable[[list[Schema]], Node]
"""The node of the values that satisfy all of some schemas."""


class Written(dict[str, Any]):
    """A schema in plain keywords that stays as it is."""
