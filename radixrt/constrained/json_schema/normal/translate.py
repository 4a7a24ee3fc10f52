"""Translates subschemas of older drafts into draft 2020-12."""

from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import (
    LIST_WORDS,
    MAP_WORDS,
    ORIGIN,
    SCHEMA_WORDS,
    TYPE_OF,
    Schema,
)
from radixrt.constrained.json_schema.normal.document import Document, Resolver
from radixrt.constrained.json_schema.walk import pointer_of

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
