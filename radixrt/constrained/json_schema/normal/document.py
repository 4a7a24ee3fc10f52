"""What does the schema that the user sent say, and which part of it does each reference mean?"""

import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema
from jsonschema.protocols import Validator

from radixrt.constrained.json_schema.errors import SchemaError

MAX_DEPTH = 200
"""Levels of nesting of the schema's JSON text."""
MAX_SIZE = 1_000_000
"""Values in the schema's JSON text."""
ENGINE_OPTIONS = ("x-guidance",)
"""Words that mean nothing in JSON schema, but switch something in a backend."""

_VALIDATORS: dict[str, type[Validator]] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
_DRAFT_OF_URI = {
    "json-schema.org/draft-04/schema": "draft4",
    "json-schema.org/draft-06/schema": "draft6",
    "json-schema.org/draft-07/schema": "draft7",
    "json-schema.org/draft/2019-09/schema": "draft2019-09",
    "json-schema.org/draft/2020-12/schema": "draft2020-12",
}
LENIENT = "lenient"
"""No draft is named: 2020-12, and words of older drafts that 2020-12 gives no other meaning."""

_SCHEMAS = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_SCHEMA_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_SCHEMA_MAPS = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}  # fmt: skip


def join(pointer: str, *steps: str | int) -> str:
    """The JSON pointer of what stands further down."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "".join((pointer, *(f"/{step}" for step in escaped)))


def children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The direct subschemas of a schema of any draft, each with the steps that lead to it."""
    for word, value in schema.items():
        if word in _SCHEMAS and isinstance(value, dict | bool):
            yield (word,), value
        elif word in _SCHEMA_LISTS and isinstance(value, list):
            for index, item in enumerate(value):
                yield (word, index), item
        elif word in _SCHEMA_MAPS and isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, dict | bool):
                    yield (word, name), item


class Document:
    """The user's schema, its draft, and an index of what can be referred to."""

    def __init__(self, schema: Any, draft: str | None = None) -> None:
        """Raises:
        SchemaError: it is not a schema of its draft, or too large.
        """
        _check_size(schema)
        if not isinstance(schema, dict | bool):
            raise SchemaError(
                "schema", "", "A schema is an object or a boolean. Send one of these."
            )
        self.root = schema
        self.draft = _check_draft(schema, _draft_of(schema, draft))
        self._bases: dict[str, str] = {}  # pointer of a subschema: its base URI
        self._resources: dict[str, str] = {}  # URI: pointer of the schema that it names
        self._anchors: dict[tuple[str, str], str] = {}  # (base URI, anchor): pointer
        self._dynamic: dict[str, list[str]] = {}  # name of a dynamic anchor: pointers
        self._resources.setdefault("", "")
        self._index(schema, "", "")

    @property
    def ignores_ref_siblings(self) -> bool:
        """Before 2019-09, words beside ``$ref`` mean nothing."""
        return self.draft in ("draft4", "draft6", "draft7")

    def _index(self, schema: Any, pointer: str, base: str) -> None:
        if not isinstance(schema, dict):
            return
        word = "id" if self.draft == "draft4" else "$id"
        name = schema.get(word)
        if isinstance(name, str) and not (self.ignores_ref_siblings and "$ref" in schema):
            uri, fragment = urldefrag(_absolute(base, name))
            if name.startswith("#"):  # an anchor, as drafts 4 to 7 write it
                self._anchors.setdefault((base, fragment), pointer)
            else:
                base = uri
                self._resources.setdefault(base, pointer)
                if fragment:
                    self._anchors.setdefault((base, fragment), pointer)
        self._bases[pointer] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), pointer)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(pointer)
        if schema.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("$recursiveAnchor", []).append(pointer)
        for word, option in schema.items():
            if word in ENGINE_OPTIONS:
                raise SchemaError(
                    word, join(pointer, word), f"It is an engine's option, not JSON schema ({option!r}). Remove it."
                )  # fmt: skip
        for steps, child in children(schema):
            self._index(child, join(pointer, *steps), base)

    def at(self, pointer: str) -> Any:
        """What stands at a pointer that :meth:`resolve` returned."""
        value: Any = self.root
        for step in _steps(pointer):
            value = value[int(step)] if isinstance(value, list) else value[step]
        return value

    def resolve(self, schema: dict[str, Any], pointer: str) -> str:
        """The pointer of what the reference in ``schema``, which stands at ``pointer``, means.

        Raises:
            SchemaError: it leads out of this document, or to nothing, or depends on how it was reached.
        """
        word = next(word for word in ("$ref", "$dynamicRef", "$recursiveRef") if word in schema)
        reference, here = schema[word], join(pointer, word)
        uri, fragment = urldefrag(_absolute(self._base_of(pointer), reference))
        if uri not in self._resources:
            raise SchemaError(
                word, here, f"{reference!r} is not in this schema, and nothing is fetched. Put it under $defs."
            )  # fmt: skip
        start = self._resources[uri]
        if not fragment or fragment.startswith("/"):
            target = self._walk(start, unquote(fragment), word, here, reference)
        elif (uri, unquote(fragment)) in self._anchors:
            target = self._anchors[uri, unquote(fragment)]
        else:
            raise SchemaError(word, here, f"{reference!r} names an anchor that this schema lacks.")
        if word != "$ref":
            name = "$recursiveAnchor" if word == "$recursiveRef" else unquote(fragment)
            if self._is_dynamic(target, name) and len(self._dynamic.get(name, [])) > 1:
                raise SchemaError(
                    word, here, "What it means depends on how it is reached, which is not supported. Use $ref."
                )  # fmt: skip
        return target

    def _is_dynamic(self, pointer: str, name: str) -> bool:
        return pointer in self._dynamic.get(name, [])

    def _base_of(self, pointer: str) -> str:
        while pointer not in self._bases:  # in a place that no keyword makes a schema
            pointer = pointer[: pointer.rindex("/")]
        return self._bases[pointer]

    def _walk(self, start: str, path: str, word: str, here: str, reference: str) -> str:
        value, pointer = self.at(start), start
        for step in _steps(path):
            try:
                value = value[int(step)] if isinstance(value, list) else value[step]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(
                    word,
                    here,
                    f"{reference!r} leads to nothing in this schema. Mend the reference.",
                ) from None
            pointer = join(pointer, step)
        if not isinstance(value, dict | bool):
            raise SchemaError(word, here, f"{reference!r} leads to something that is not a schema.")
        return pointer


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _absolute(base: str, reference: str) -> str:
    """``urljoin``, also for bases such as ``urn:...`` that it does not know."""
    if reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)


def _draft_of(schema: Any, draft: str | None) -> str:
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(uri, str):
        known = _DRAFT_OF_URI.get(uri.rstrip("#").partition("://")[2])
        if "draft-03" in uri:
            raise SchemaError(
                "$schema", "/$schema", "Draft 3 is not supported. Use draft 4 or later."
            )
        if known:
            return known
    if draft is not None and draft not in (*_VALIDATORS, LENIENT):
        raise ValueError(f"draft is one of {', '.join(_VALIDATORS)}, not {draft!r}")
    return draft or LENIENT


def _check_draft(schema: Any, draft: str) -> str:
    """The draft, once its meta-schema has accepted the schema.

    Where no draft is named, the newest whose meta-schema accepts it, so that the array form of ``items`` and
    the boolean form of ``exclusiveMinimum`` are read as they were meant.
    """
    if draft != LENIENT:
        _check_against(schema, draft)
        return draft
    for candidate in ("draft2020-12", "draft7", "draft4"):
        if _VALIDATORS[candidate](_VALIDATORS[candidate].META_SCHEMA).is_valid(schema):
            return LENIENT if candidate == "draft2020-12" else candidate
    _check_against(schema, "draft2020-12")
    raise AssertionError("a meta-schema contradicts itself")


def _check_against(schema: Any, draft: str) -> None:
    # Without a format checker: whether a pattern is one of ECMA-262 is for the backends to judge.
    validator = _VALIDATORS[draft](_VALIDATORS[draft].META_SCHEMA)
    error = jsonschema.exceptions.best_match(validator.iter_errors(schema))
    if error is not None:
        path = [str(step) for step in error.absolute_path]
        word = next((step for step in reversed(path) if not step.isdigit()), "schema")
        text = error.message if len(error.message) < 300 else error.message[:300] + "…"
        raise SchemaError(word, join("", *path), f"Not valid in {draft}: {text}.")


def _check_size(schema: Any) -> None:
    level, depth, size = [schema], 0, 0
    while level:
        size, depth = size + len(level), depth + 1
        if depth > MAX_DEPTH:
            raise SchemaError("schema", "", f"It is nested more than {MAX_DEPTH} levels deep.")
        if size > MAX_SIZE:
            raise SchemaError(
                "schema", "", f"It holds more than {MAX_SIZE} values. Make it smaller."
            )
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise SchemaError("schema", "", "It holds a number that is too large for a float.")
        level = below
