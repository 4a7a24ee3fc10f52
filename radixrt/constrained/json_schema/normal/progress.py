"""Finds references that lead back to themselves without a step into the value, and schemas that
only infinite values satisfy."""

from collections.abc import Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.finite import cause_of, endless_symbols
from radixrt.constrained.json_schema.keywords import IN_PLACE, ORIGIN, Schema
from radixrt.constrained.json_schema.normal.node import Node
from radixrt.constrained.json_schema.normal.translate import Translator
from radixrt.constrained.json_schema.walk import children


def check_progress(translator: Translator) -> None:
    """Look at all that can be reached from the root. Raises CannotEnforce if a reference does not
    resolve, or a loop of references takes no step into the value."""
    finished: set[int] = set()
    inner: list[Schema] = [translator.translated("")]

    def visit(schema: Schema, around: frozenset[int]) -> None:
        if isinstance(schema, bool) or id(schema) in finished:
            return
        if id(schema) in around:
            reason = "References lead back to this schema without a step into the value."
            raise CannotEnforce("$ref", schema.get(ORIGIN, ""), reason)
        below = around | {id(schema)}
        if "$ref" in schema:
            visit(translator.translated(schema["$ref"][1:]), below)
        for path, child in children(schema):
            if path[0] in (*IN_PLACE, "dependentSchemas"):
                visit(child, below)
            else:
                inner.append(child)
        finished.add(id(schema))

    while inner:
        visit(inner.pop(), frozenset())


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
