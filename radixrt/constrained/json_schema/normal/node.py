"""The nodes of a schema in normal form, and the schema that a graph of them is written as."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.finite import cause_of, endless_symbols
from radixrt.constrained.json_schema.keywords import ORIGIN, Schema, distinct, mapped


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


INLINE_SIZE = 6
"""A schema with more keywords that several others hold is written once, under ``$defs``."""


def write(root: Node, more_defs: dict[str, Any]) -> Any:
    """The schema of a graph. ``more_defs`` are definitions that are already written."""
    return _Writer(root).schema(more_defs)


def write_alone(node: Node) -> Any:
    """The schema of a node that needs no definitions; None if it does, or isn't known yet."""
    waiting: list[Any] = [node]
    seen: set[Node] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Written) or (isinstance(value, Node) and value.schema is None):
            return None
        if isinstance(value, Node) and value not in seen:
            seen.add(value)
            waiting.append(value.schema)
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    written = write(node, {})
    return None if isinstance(written, dict) and "$defs" in written else written


class _Writer:
    def __init__(self, root: Node) -> None:
        self._root = root
        self._sizes: dict[Node, int] = {}
        self._shared: set[Node] = set()
        self._open: set[Node] = set()
        self._names: dict[Node, str] = {}
        self._defs: dict[str, Any] = {}
        self._measure(root)

    def schema(self, more_defs: dict[str, Any]) -> Any:
        written = self._written(self._root)
        if isinstance(written, dict) and (self._defs or more_defs):
            written = {**written, "$defs": {**self._defs, **more_defs}}
        return written

    def _measure(self, node: Node) -> int:
        """Number of keywords of a schema; a shared schema counts as one reference."""
        if node in self._open:
            self._shared.add(node)
            return 1
        if node in self._sizes:
            if self._sizes[node] > INLINE_SIZE:
                self._shared.add(node)
            return 1 if node in self._shared else self._sizes[node]
        self._open.add(node)
        size = self._measure_value(node.schema)
        self._open.discard(node)
        self._sizes[node] = size
        return 1 if node in self._shared else size

    def _measure_value(self, value: Any) -> int:
        if isinstance(value, Node):
            return self._measure(value)
        if isinstance(value, dict):
            return len(value) + sum(self._measure_value(item) for item in value.values())
        if isinstance(value, list):
            return len(value) // 4 + sum(
                self._measure_value(item) for item in value if isinstance(item, Node | dict | list)
            )
        return 0

    def _written(self, schema: Any) -> Any:
        """A node or its equivalent: a boolean, keywords of which some hold nodes, or a schema that
        is written already."""
        if isinstance(schema, Written):
            return dict(schema)
        if isinstance(schema, dict):
            return mapped({ORIGIN: "", **schema}, lambda _, child: self._written(child))
        if not isinstance(schema, Node):
            return schema
        if schema not in self._shared:
            return self._words(schema)
        if schema not in self._names:
            name = self._names[schema] = self._new_name(schema.origin)
            self._defs[name] = None  # keeps its place while it is written
            self._defs[name] = self._words(schema)
        return {ORIGIN: schema.origin, "$ref": f"#/$defs/{self._names[schema]}"}

    def _words(self, node: Node) -> Any:
        if isinstance(node.schema, bool):
            return node.schema
        assert node.schema is not None, "a schema was written before it was known"
        words = {ORIGIN: node.origin, **node.schema}
        if len(words.get("enum", ())) == 1:
            words = {ORIGIN: node.origin, "const": words.pop("enum")[0], **words}
        return self._written(words)

    def _new_name(self, origin: str) -> str:
        last = origin.rsplit("/", 1)[-1] if origin else "root"
        name = base = re.sub(r"[^A-Za-z0-9_.-]+", "_", last)[:40] or "schema"
        count = 1
        while name in self._defs:
            count += 1
            name = f"{base}_{count}"
        return name


def deny_endless(root: Node) -> None:
    """Make the schemas in the graph false that no finite value satisfies; they are equal to false.
    Raises CannotEnforce if the root is one of them; names the part of the user's schema."""
    graph = list(_graph(root))
    endless = [node for node in endless_symbols(graph, _needs) if not node.is_never]
    if root in endless:
        origin = cause_of([root, *endless], _needs).origin
        reason = (
            "No finite value satisfies it: each needs another one inside it. Let the recursion end, by a property that is not "
            "required, an array that may be empty, or another alternative."
        )
        raise CannotEnforce("schema", origin, reason)
    for node in endless:
        node.schema = False
    if endless:
        for node in graph:
            if isinstance(node.schema, dict):
                for word in ("anyOf", "oneOf"):
                    if word in node.schema:
                        kept = [part for part in node.schema[word] if not part.is_never]
                        node.schema = {**node.schema, word: kept}


def _needs(node: Node) -> list[list[Node]]:
    """What a finite value needs, at least: of each group, a value of one node."""
    words = node.schema
    if not isinstance(words, dict):
        return [] if words is not False else [[]]
    groups = [[part] for part in words.get("allOf", ()) if isinstance(part, Node)]
    groups += [words[word] for word in ("anyOf", "oneOf") if word in words]
    if words.get("type") == "object":
        groups += _needs_of_object(words)
    elif words.get("type") == "array":
        prefix: list[Node] = words.get("prefixItems", [])
        least: int = words.get("minItems", 0)
        groups += [[item] for item in prefix[:least]]
        if least > len(prefix) and isinstance(words.get("items"), Node):
            groups.append([words["items"]])
        if "contains" in words and words.get("minContains", 1) > 0:
            groups.append([words["contains"]])
    return groups


def _needs_of_object(words: dict[str, Any]) -> Iterator[list[Node]]:
    properties: dict[str, Node] = words.get("properties", {})
    patterns: dict[str, Node] = words.get("patternProperties", {})
    additional = words.get("additionalProperties")
    required: list[str] = words.get("required", [])
    for name in required:
        if name in properties:
            yield [properties[name]]
        elif not patterns and isinstance(additional, Node):
            yield [additional]
    if words.get("minProperties", 0) > len(required) and isinstance(additional, Node):
        yield [*properties.values(), *patterns.values(), additional]


def _graph(root: Node) -> Iterator[Node]:
    """Every node, with those that no value needs."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Node):
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield value
            value = value.schema
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += (item for item in value if isinstance(item, Node | dict | list))
