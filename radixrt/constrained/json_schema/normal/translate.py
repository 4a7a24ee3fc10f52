"""What would a subschema of an older draft say in the words of 2020-12?"""

from typing import Any

from radixrt.constrained.json_schema.keywords import (
    LIST_WORDS,
    MAP_WORDS,
    ORIGIN,
    SCHEMA_WORDS,
    TYPE_OF,
    Schema,
)
from radixrt.constrained.json_schema.normal.document import LENIENT, Document, join

_KEPT = {*TYPE_OF, "type", "enum", "const"}
_SINCE_DRAFT6 = {"const", "contains", "propertyNames"}
_SINCE_DRAFT7 = {"if", "then", "else"}
_SINCE_2019 = {
    "dependentRequired",
    "dependentSchemas",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
}


class Translator:
    """Reads subschemas of a document, in 2020-12's words and without annotations.

    ``$ref`` becomes the pointer of its target, ``#/definitions/a`` for example, wherever that stands.

    One thing is lost: draft 4 tells 1.0 from 1, so that 1.0 is no integer, and 2020-12 has no word for that.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._unknown = _words_unknown_to(document.draft)
        self._done: dict[str, Schema] = {}

    def at(self, pointer: str) -> Schema:
        """The translated subschema at a pointer."""
        if pointer not in self._done:
            self._done[pointer] = self._translate(self._document.at(pointer), pointer)
        return self._done[pointer]

    def _translate(self, schema: Any, pointer: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        document = self._document
        if document.ignores_ref_siblings and "$ref" in schema:
            return {ORIGIN: pointer, "$ref": "#" + document.resolve(schema, pointer)}
        result: dict[str, Any] = {ORIGIN: pointer}
        for word, value in schema.items():
            if word not in self._unknown:
                self._word(result, schema, word, value, pointer)
        return result

    def _word(
        self, result: dict[str, Any], schema: dict[str, Any], word: str, value: Any, pointer: str
    ) -> None:
        here = join(pointer, word)
        legacy_items = self._document.draft != "draft2020-12" and isinstance(
            schema.get("items"), list
        )
        if word in ("$ref", "$dynamicRef", "$recursiveRef"):
            target = "#" + self._document.resolve({word: value}, pointer)
            if word == "$ref":
                result["$ref"] = target
            else:
                result.setdefault("allOf", []).append({ORIGIN: pointer, "$ref": target})
        elif word == "items" and legacy_items:
            result["prefixItems"] = self._list(value, here)
        elif word == "additionalItems":
            if legacy_items:
                result["items"] = self._translate(value, here)
        elif word == "dependencies":
            self._dependencies(result, value, here)
        elif word in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            pass  # said by the bound that it belongs to
        elif word in ("minimum", "maximum"):
            exclusive = "exclusive" + word.capitalize()
            result[exclusive if schema.get(exclusive) is True else word] = value
        elif word in SCHEMA_WORDS:
            result[word] = self._translate(value, here)
        elif word in LIST_WORDS:
            result[word] = [*self._list(value, here), *result.get(word, [])]
        elif word in MAP_WORDS:
            translated = {
                name: self._translate(item, join(here, name)) for name, item in value.items()
            }
            result[word] = {**result.get(word, {}), **translated}
        elif word == "dependentRequired":
            result[word] = {**result.get(word, {}), **value}
        elif word in _KEPT:
            result[word] = value

    def _list(self, schemas: list[Any], pointer: str) -> list[Schema]:
        return [
            self._translate(schema, join(pointer, index)) for index, schema in enumerate(schemas)
        ]

    def _dependencies(self, result: dict[str, Any], value: dict[str, Any], pointer: str) -> None:
        for name, needed in value.items():
            if isinstance(needed, list):
                result.setdefault("dependentRequired", {}).setdefault(name, needed)
            else:
                translated = self._translate(needed, join(pointer, name))
                result.setdefault("dependentSchemas", {}).setdefault(name, translated)


def _words_unknown_to(draft: str) -> set[str]:
    """Words that a draft gives no meaning, though a later or earlier one does."""
    if draft == LENIENT:
        return set()
    unknown: set[str] = set()
    if draft == "draft4":
        unknown |= _SINCE_DRAFT6
    if draft in ("draft4", "draft6"):
        unknown |= _SINCE_DRAFT7
    if draft in ("draft4", "draft6", "draft7"):
        unknown |= _SINCE_2019 | {"prefixItems", "$dynamicRef", "$recursiveRef"}
    if draft == "draft2019-09":
        unknown |= {"prefixItems", "$dynamicRef", "dependencies"}
    if draft == "draft2020-12":
        unknown |= {"dependencies", "additionalItems", "$recursiveRef"}
    return unknown
