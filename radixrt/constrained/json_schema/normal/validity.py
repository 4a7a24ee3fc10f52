"""Does a value satisfy translated schemas? jsonschema decides; where its reading is not certain, nobody does."""

from typing import Any

import jsonschema

from radixrt.constrained.json_schema.keywords import NOT_IN, NOT_INTEGER, ORIGIN, Schema
from radixrt.constrained.json_schema.normal.translate import Translator
from radixrt.constrained.json_schema.normal.values import is_plain, matches


class RawWriter:
    """Writes translated schemas as plain 2020-12, every target of a reference under ``$defs``."""

    def __init__(self, translator: Translator, prefix: str, keep_origins: bool) -> None:
        self._translator = translator
        self._prefix = prefix
        self._keep = keep_origins
        self._names: dict[str, str] = {}
        self.defs: dict[str, Any] = {}

    def write(self, raw: Any) -> Any:
        """The schema in plain words; what it refers to is added to :attr:`defs`."""
        if isinstance(raw, bool):
            return raw
        plain: dict[str, Any] = {}
        denials: list[Any] = []
        for word, value in raw.items():
            if word == NOT_IN:
                denials.append({"enum": value})
            elif word == NOT_INTEGER:
                denials.append({"type": "integer"})
            elif word == ORIGIN:
                if self._keep:
                    plain[word] = value
            elif word == "$ref":
                plain[word] = "#/$defs/" + self._name(value[1:])
            elif word in ("enum", "const", "required", "dependentRequired"):
                plain[word] = value
            elif isinstance(value, list):
                plain[word] = [self.write(v) if isinstance(v, dict) else v for v in value]
            elif word in ("properties", "patternProperties", "dependentSchemas"):
                plain[word] = {name: self.write(item) for name, item in value.items()}
            elif isinstance(value, dict):
                plain[word] = self.write(value)
            else:
                plain[word] = value
        if denials:
            nots = [{"not": denied} for denied in denials]
            plain["allOf"] = [*plain.get("allOf", []), *nots]
        return plain

    def _name(self, pointer: str) -> str:
        if pointer not in self._names:
            name = self._names[pointer] = f"{self._prefix}{len(self._names)}"
            self.defs[name] = None  # a place, in the order of first use
            self.defs[name] = self.write(self._translator.at(pointer))
        return self._names[pointer]


class Judge:
    """Tells which values of a finite set satisfy a conjunction."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def sort(self, values: list[Any], conjuncts: list[Schema]) -> tuple[list[Any], bool]:
        """Which values satisfy all conjuncts, and whether that is certain.

        Where it is not, because of a pattern or format, the values are those that may.
        """
        writer = RawWriter(self._translator, "r", keep_origins=False)
        plain = [writer.write(raw) for raw in conjuncts]
        if all(schema is True or schema == {} for schema in plain):
            return values, True
        everything = [plain, writer.defs]
        patterns = list(_patterns_in(everything))
        certain = not _has_inner_format(plain, writer.defs)
        texts = [text for value in values for text in _texts_in(value)] if patterns else []
        if (
            any(not is_plain(text) for text in texts)
            or len(texts) * len(patterns) > 100_000
            or any(matches(p, t) is None for p in patterns for t in texts)
        ):
            certain = False
        if not certain:
            return values, False
        validator = jsonschema.Draft202012Validator({"allOf": plain, "$defs": writer.defs})
        return [value for value in values if validator.is_valid(value)], True


def _has_inner_format(plain: list[Any], defs: dict[str, Any]) -> bool:
    """``format`` at the top is carried along with the values; deeper down it is not."""
    inner = [
        {word: value for word, value in schema.items() if word != "format"}
        for schema in plain
        if isinstance(schema, dict)
    ]
    return any(word == "format" for word in _words_in([inner, defs]))


def _words_in(value: Any) -> list[str]:
    found: list[str] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            found.extend(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return found


def _patterns_in(value: Any) -> set[str]:
    found, left = set(), [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if isinstance(item.get("pattern"), str):
                found.add(item["pattern"])
            if isinstance(item.get("patternProperties"), dict):
                found.update(item["patternProperties"])
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return found


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _texts_in(item)]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _texts_in(item))]
    return []
