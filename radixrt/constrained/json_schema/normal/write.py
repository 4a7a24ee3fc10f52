"""How is the graph of normalised schemas written as one schema, with ``$defs`` for what is shared?"""

import re
from typing import Any

from radixrt.constrained.json_schema.keywords import MAP_WORDS, ORIGIN
from radixrt.constrained.json_schema.normal.node import Node, Written

_PLAIN_VALUES = ("enum", "const", "required", "dependentRequired", "type", ORIGIN)
"""Keywords whose values are no schemas, whatever they look like."""
INLINE_SIZE = 6
"""A schema that several others hold is written once, under ``$defs``, if it has more words than this."""


def write(root: Node, more_defs: dict[str, Any]) -> Any:
    """The schema of a graph. ``more_defs`` are definitions that are already written."""
    return _Writer(root).schema(more_defs)


def strip_origins(schema: Any) -> Any:
    """The same schema without the private key that tells where each part stems from."""
    if isinstance(schema, dict):
        result = {}
        for word, value in schema.items():
            if word == ORIGIN and isinstance(value, str):
                continue
            if word in ("enum", "const"):
                result[word] = value
            elif word in ("properties", "patternProperties", "$defs") and isinstance(value, dict):
                result[word] = {name: strip_origins(item) for name, item in value.items()}
            else:
                result[word] = strip_origins(value)
        return result
    return [strip_origins(item) for item in schema] if isinstance(schema, list) else schema


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
        written = self._node(self._root)
        if isinstance(written, dict) and (self._defs or more_defs):
            written = {**written, "$defs": {**self._defs, **more_defs}}
        return written

    def _measure(self, node: Node) -> int:
        """How many words a schema has, those of shared schemas counted as one reference."""
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

    def _node(self, node: Node) -> Any:
        if isinstance(node.schema, bool):
            return node.schema
        if node not in self._shared:
            return self._written(node)
        if node not in self._names:
            name = self._names[node] = self._new_name(node.origin)
            self._defs[name] = None  # keeps its place while it is written
            self._defs[name] = self._written(node)
        return {ORIGIN: node.origin, "$ref": f"#/$defs/{self._names[node]}"}

    def _written(self, node: Node) -> dict[str, Any]:
        assert isinstance(node.schema, dict), "a schema was written before it was known"
        words = {word: self._value(word, value) for word, value in node.schema.items()}
        if "enum" in words and len(words["enum"]) == 1:
            words = {"const": words.pop("enum")[0], **words}
        return {ORIGIN: node.origin, **words}

    def _value(self, word: str, value: Any) -> Any:
        """What stands under a keyword: values as they are, schemas written."""
        if word in _PLAIN_VALUES:
            return value
        if word in (*MAP_WORDS, "$defs") and isinstance(value, dict):
            return {name: self._schema(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._schema(item) for item in value]
        return self._schema(value)

    def _schema(self, schema: Any) -> Any:
        """A schema that is a node or a dictionary; anything else as it is."""
        if isinstance(schema, Node):
            return self._node(schema)
        if isinstance(schema, Written):
            return dict(schema)
        if not isinstance(schema, dict):
            return schema
        words = {word: self._value(word, value) for word, value in schema.items()}
        return words if ORIGIN in words else {ORIGIN: "", **words}

    def _new_name(self, origin: str) -> str:
        last = origin.rsplit("/", 1)[-1] if origin else "root"
        name = base = re.sub(r"[^A-Za-z0-9_.-]+", "_", last)[:40] or "schema"
        count = 1
        while name in self._defs:
            count += 1
            name = f"{base}_{count}"
        return name
