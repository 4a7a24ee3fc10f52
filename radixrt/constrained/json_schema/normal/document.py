"""Reads the schema that the user sent: resolves its references, and translates the subschemas of older
drafts into draft 2020-12."""

import functools
import math
from typing import Any

import jsonschema
import jsonschema_rs
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import (
    IN_PLACE,
    LIST_WORDS,
    MAP_WORDS,
    ORIGIN,
    SCHEMA_WORDS,
    TYPE_OF,
    Schema,
    children,
    pointer_of,
    values_in,
)

MAX_DEPTH = 200
"""Levels of nesting of the schema's JSON text."""
MAX_SIZE = 1_000_000
"""Values in the schema's JSON text."""

_VALIDATORS: dict[str, type[Validator]] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
_URIS = {draft: validator.META_SCHEMA["$schema"] for draft, validator in _VALIDATORS.items()}
_FAST = {
    "draft4": jsonschema_rs.Draft4Validator,
    "draft6": jsonschema_rs.Draft6Validator,
    "draft7": jsonschema_rs.Draft7Validator,
    "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft2020-12": jsonschema_rs.Draft202012Validator,
}
"""They judge schemas as ``jsonschema`` does, which a test compares, in a fiftieth of the time."""
LENIENT = "lenient"
"""No draft is named: 2020-12, and keywords of older drafts that 2020-12 gives no other meaning."""

Resolver = Any
"""A resolver of the library referencing (its class has no public name): resolves references at one
place of a document."""


class Document:
    """The user's schema, its draft, and the targets of its references.

    Attributes:
        ignores_ref_siblings: before 2019-09, keywords beside ``$ref`` mean nothing.
        resolver: of references in the root; see :meth:`inside`.
    """

    def __init__(self, schema: Any) -> None:
        """Raises CannotEnforce if it is not a schema of its draft, or too large."""
        _check_size(schema)
        if not isinstance(schema, dict | bool):
            raise CannotEnforce.whole("A schema is an object or a boolean. Send one of these.")
        self.root = schema
        self.draft = _draft_of(schema)
        self.ignores_ref_siblings = self.draft in ("draft4", "draft6", "draft7")
        self._specification = specification_with(_URIS.get(self.draft, _URIS["draft2020-12"]))
        root = self._specification.create_resource(schema)
        self.resolver: Resolver = Registry().resolver_with_root(root)

    @functools.cached_property
    def _pointers(self) -> dict[int, str]:
        """The pointer of each object in the text, by its identity."""
        found: dict[int, str] = {}

        def index(value: Any, pointer: str) -> None:
            if isinstance(value, dict):
                found[id(value)] = pointer
                for key, item in value.items():
                    if isinstance(item, dict | list):
                        index(item, pointer + pointer_of([key]))
            elif isinstance(value, list):
                for at, item in enumerate(value):
                    index(item, f"{pointer}/{at}")

        index(self.root, "")
        return found

    @functools.cached_property
    def _dynamic(self) -> list[Any]:
        """The name of each dynamic anchor in the text; ``#`` for a recursive one."""
        objects = [value for value in values_in(self.root) if isinstance(value, dict)]
        names = [value.get("$dynamicAnchor") for value in objects]
        return names + ["#" for value in objects if value.get("$recursiveAnchor") is True]

    def inside(self, schema: Any, resolver: Resolver) -> Resolver:
        """The resolver of references in a subschema, which may have a base URI of its own."""
        if isinstance(schema, bool) or not ("$id" in schema or "id" in schema):
            return resolver
        return resolver.in_subresource(self._specification.create_resource(schema))

    def resolve(
        self, word: str, reference: str, pointer: str, resolver: Resolver
    ) -> tuple[Any, str, Resolver]:
        """The target of the reference under ``word`` of the schema at ``pointer``, the target's
        pointer (empty for a boolean), and the resolver there. Raises CannotEnforce if it leads out
        of this document, or to nothing, or depends on how it was reached."""
        here = f"{pointer}/{word}"
        try:
            found = resolver.lookup(reference)
        except Unresolvable:
            raise CannotEnforce(
                word, here, f"{reference!r} leads to nothing in this schema, and nothing is fetched. Put it under $defs."
            ) from None  # fmt: skip
        target = found.contents
        if isinstance(target, bool):
            return target, "", found.resolver
        if id(target) not in self._pointers:
            raise CannotEnforce(
                word, here, f"{reference!r} leads to something that is not a schema."
            )
        is_dynamic = {
            "$ref": False,
            "$dynamicRef": target.get("$dynamicAnchor") == reference.partition("#")[2],
            "$recursiveRef": target.get("$recursiveAnchor") is True,
        }[word]
        name = target.get("$dynamicAnchor") if word == "$dynamicRef" else "#"
        if is_dynamic and self._dynamic.count(name) > 1:
            raise CannotEnforce(
                word, here, "What it means depends on how it is reached, which is not supported. Use $ref."
            )  # fmt: skip
        return target, self._pointers[id(target)], found.resolver


def _draft_of(schema: Any) -> str:
    """The draft that the schema names, once its meta-schema has accepted the schema.

    Where no draft is named, the newest whose meta-schema accepts it, so that the array form of
    ``items`` and the boolean form of ``exclusiveMinimum`` are read as they were meant.
    """
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(uri, str):
        if "draft-03" in uri:
            raise CannotEnforce(
                "$schema", "/$schema", "Draft 3 is not supported. Use draft 4 or later."
            )
        for draft, known in _URIS.items():
            if uri.rstrip("#").partition("://")[2] == known.rstrip("#").partition("://")[2]:
                _check_against(schema, draft)
                return draft
    for draft in ("draft2020-12", "draft7", "draft4"):
        if _is_valid(schema, draft):
            return LENIENT if draft == "draft2020-12" else draft
    _check_against(schema, "draft2020-12")
    raise AssertionError("a meta-schema contradicts itself")


@functools.cache
def _meta_validator(draft: str) -> Any:
    # Formats are not checked: whether a pattern is one of ECMA-262 is for the backends to judge.
    return _FAST[draft](_VALIDATORS[draft].META_SCHEMA, validate_formats=False)


def _is_valid(schema: Any, draft: str) -> bool:
    """Whether the draft's meta-schema accepts a schema."""
    return bool(_meta_validator(draft).is_valid(schema))


def _check_against(schema: Any, draft: str) -> None:
    if _is_valid(schema, draft):
        return
    validator = _VALIDATORS[draft](_VALIDATORS[draft].META_SCHEMA)
    error = jsonschema.exceptions.best_match(validator.iter_errors(schema))
    if error is not None:
        path = [str(step) for step in error.absolute_path]
        word = next((step for step in reversed(path) if not step.isdigit()), "schema")
        text = error.message if len(error.message) < 300 else error.message[:300] + "…"
        raise CannotEnforce(word, pointer_of(path), f"Not valid in {draft}: {text}.")


def _check_size(schema: Any) -> None:
    level, depth, size = [schema], 0, 0
    while level:
        size, depth = size + len(level), depth + 1
        if depth > MAX_DEPTH:
            raise CannotEnforce.whole(f"It is nested more than {MAX_DEPTH} levels deep.")
        if size > MAX_SIZE:
            raise CannotEnforce.whole(f"It holds more than {MAX_SIZE} values. Make it smaller.")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise CannotEnforce.whole("It holds a number that is too large for a float.")
        level = below


_KEPT = {*TYPE_OF, "type", "enum", "const"}
ENGINE_OPTIONS = ("x-guidance",)
"""Keywords that mean nothing in JSON schema, but switch something in a backend."""

_BEFORE_2019 = (
    "dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "prefixItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_BEFORE_DRAFT7 = (*_BEFORE_2019, "if", "then", "else")
_UNKNOWN_TO: dict[str, tuple[str, ...]] = {
    "draft4": (*_BEFORE_DRAFT7, "const", "contains", "propertyNames"),
    "draft6": _BEFORE_DRAFT7,
    "draft7": _BEFORE_2019,
    "draft2019-09": ("prefixItems", "$dynamicRef", "dependencies"),
    "draft2020-12": ("dependencies", "additionalItems", "$recursiveRef"),
}
"""Keywords without meaning in a draft that have one in a later or earlier draft."""


class Translator:
    """Reads subschemas of a document, with 2020-12's keywords and without annotations.

    ``$ref`` becomes the pointer of its target, ``#/definitions/a`` for example, wherever that
    stands.

    One difference is lost: in draft 4, 1.0 is not an integer; 2020-12 can't express that.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._unknown = _UNKNOWN_TO.get(document.draft, ())
        self._targets: dict[str, tuple[Any, Resolver]] = {"": (document.root, document.resolver)}
        self._done: dict[str, Schema] = {}

    def translated(self, pointer: str) -> Schema:
        """The translated subschema at the pointer of a ``$ref``; that of the root is empty."""
        if pointer not in self._done:
            schema, resolver = self._targets[pointer]
            self._done[pointer] = self._translate(schema, pointer, resolver)
        return self._done[pointer]

    def _translate(self, schema: Any, pointer: str, resolver: Resolver) -> Schema:
        if isinstance(schema, bool):
            return schema
        result: dict[str, Any] = {ORIGIN: pointer}
        if self._document.ignores_ref_siblings and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        for word, value in schema.items():
            if word in ENGINE_OPTIONS:
                raise CannotEnforce(
                    word, f"{pointer}/{word}", f"It is an engine's option, not JSON schema ({value!r}). Remove it."
                )  # fmt: skip
            if word not in self._unknown:
                self._word(result, schema, word, pointer, resolver)
        return result

    def _word(
        self,
        result: dict[str, Any],
        schema: dict[str, Any],
        word: str,
        pointer: str,
        resolver: Resolver,
    ) -> None:
        value, here = schema[word], f"{pointer}/{word}"
        legacy_items = self._document.draft != "draft2020-12" and isinstance(
            schema.get("items"), list
        )

        def translated(item: Any, *steps: str | int) -> Schema:
            inside = self._document.inside(item, resolver)
            return self._translate(item, here + pointer_of(steps), inside)

        if word in ("$ref", "$dynamicRef", "$recursiveRef"):
            self._reference(result, word, value, pointer, resolver)
        elif word == "items" and legacy_items:
            result["prefixItems"] = [translated(item, index) for index, item in enumerate(value)]
        elif word == "additionalItems":
            if legacy_items:
                result["items"] = translated(value)
        elif word == "dependencies":
            for name, needed in value.items():
                if isinstance(needed, list):
                    result.setdefault("dependentRequired", {}).setdefault(name, needed)
                else:
                    schemas = result.setdefault("dependentSchemas", {})
                    schemas.setdefault(name, translated(needed, name))
        elif word in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            pass  # said by the bound that it belongs to
        elif word in ("minimum", "maximum"):
            exclusive = "exclusive" + word.capitalize()
            result[exclusive if schema.get(exclusive) is True else word] = value
        elif word in SCHEMA_WORDS:
            result[word] = translated(value)
        elif word in LIST_WORDS:
            items = [translated(item, index) for index, item in enumerate(value)]
            result[word] = [*items, *result.get(word, [])]
        elif word in MAP_WORDS:
            named = {name: translated(item, name) for name, item in value.items()}
            result[word] = {**result.get(word, {}), **named}
        elif word == "dependentRequired":
            result[word] = {**result.get(word, {}), **value}
        elif word in _KEPT:
            result[word] = value

    def _reference(
        self,
        result: dict[str, Any],
        word: str,
        reference: str,
        pointer: str,
        resolver: Resolver,
    ) -> None:
        target, at, there = self._document.resolve(word, reference, pointer, resolver)
        if isinstance(target, bool):
            result.setdefault("allOf", []).append(target)
            return
        self._targets.setdefault(at, (target, there))
        if word == "$ref":
            result["$ref"] = "#" + at
        else:
            result.setdefault("allOf", []).append({ORIGIN: pointer, "$ref": "#" + at})


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
