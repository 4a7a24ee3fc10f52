"""What is a normalised schema made of while it is being made?"""

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """One normalised schema, shared by all that hold it.

    Where a keyword holds a schema, the dictionary holds a node.
    """

    origin: str
    schema: dict[str, Any] | bool | None = None
    """None as long as it is not known, which those that refer to themselves see."""

    @property
    def is_never(self) -> bool:
        return self.schema is False

    @property
    def is_any(self) -> bool:
        return self.schema is True

    def alternatives(self) -> list["Node"]:
        """The nodes whose union this is."""
        if self.is_never:
            return []
        if isinstance(self.schema, dict) and self.schema.keys() == {"anyOf"}:
            nodes: list[Node] = self.schema["anyOf"]
            return nodes
        return [self]


class Written(dict[str, Any]):
    """A schema in plain words that stays as it is."""
