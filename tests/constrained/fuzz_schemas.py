"""Generates random schemas with all keywords of draft 2020-12, and compares what their grammars and
checks accept with ``jsonschema``.

``python -m tests.constrained.fuzz_schemas --schemas 10000 --seed 0`` prints a table, and exits with
1 if an invalid value was accepted or a schema made the compiler fail. A failure names its seed.
``fuzz_failures.jsonl`` keeps schemas that failed once, made smaller, with their seeds and wrong
values; they are tried again first, and by the tests.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from bench.structured import Held, Refused, router
from radixrt.base.config import DEMO_MODEL
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.json_schema.checks import checkable
from radixrt.constrained.json_schema.validation import SchemaValidator
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.checkpoint import resolve_model_path

FAILURES = Path(__file__).parent / "fuzz_failures.jsonl"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
NAMES = ("a", "b", "ab", "kind", "a b", 'q"', "é")
PATTERNS = ("a", "^a", "b$", "^ab$", "^[a-e]*$", "^(ab+)?$", "^[^a]+$", "^.{2,3}$")
FORMATS = ("date", "ipv4", "uuid", "ipv6")
TEXTS = ("", "a", "b", "ab", "abcd", "é\n", "2024-02-29", "127.0.0.1", 'q"')
NUMBERS = (-1, 0, 1, 2, 3, 0.5, 1.0, -1e-09, 20)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SLOW_S = 10.0
WALKS = 3
MAX_TOKENS = 120


class SchemaMaker:
    """One random schema for each seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._keywords: dict[str, tuple[str, Callable[[int], Any]]] = {
            "minimum": ("number", lambda _: self._of(NUMBERS)),
            "maximum": ("number", lambda _: self._of(NUMBERS)),
            "exclusiveMinimum": ("number", lambda _: self._of(NUMBERS)),
            "exclusiveMaximum": ("number", lambda _: self._of(NUMBERS)),
            "multipleOf": ("number", lambda _: self._of((1, 2, 3, 0.5))),
            "minLength": ("string", lambda _: self._size()),
            "maxLength": ("string", lambda _: self._size()),
            "pattern": ("string", lambda _: self._of(PATTERNS)),
            "format": ("string", lambda _: self._of(FORMATS)),
            "prefixItems": ("array", self._list),
            "items": ("array", self._schema),
            "contains": ("array", self._schema),
            "minContains": ("array", lambda _: self._size()),
            "maxContains": ("array", lambda _: self._size()),
            "minItems": ("array", lambda _: self._size()),
            "maxItems": ("array", lambda _: self._size()),
            "uniqueItems": ("array", lambda _: self._chance(0.7)),
            "unevaluatedItems": ("array", self._schema),
            "properties": ("object", lambda depth: self._map(NAMES, depth)),
            "patternProperties": ("object", lambda depth: self._map(PATTERNS, depth)),
            "additionalProperties": ("object", self._schema),
            "propertyNames": ("object", self._schema),
            "required": ("object", lambda _: self._names()),
            "minProperties": ("object", lambda _: self._size()),
            "maxProperties": ("object", lambda _: self._size()),
            "dependentRequired": ("object", lambda _: {self._of(NAMES): self._names()}),
            "dependentSchemas": ("object", lambda depth: self._map(NAMES, depth)),
            "unevaluatedProperties": ("object", self._schema),
            "allOf": ("any", self._list),
            "anyOf": ("any", self._list),
            "oneOf": ("any", self._list),
            "not": ("any", self._schema),
            "if": ("any", self._schema),
            "then": ("any", self._schema),
            "else": ("any", self._schema),
            "const": ("any", lambda _: self.value(2)),
            "enum": ("any", lambda _: [self.value(2) for _ in range(self.random.randint(1, 4))]),
            "$ref": ("any", lambda _: self._of(("#/$defs/one", "#/$defs/two", "#named", "#"))),
            "$dynamicRef": ("any", lambda _: "#named"),
            "title": ("any", lambda _: "A title"),
            "default": ("any", lambda _: self.value(2)),
        }  # fmt: skip

    def make(self) -> dict[str, Any]:
        """A schema with two definitions, the first of which has an anchor."""
        schema, one, two = (self._words(depth) for depth in (0, 1, 1))
        anchor = self._of(("$anchor", "$dynamicAnchor"))
        return {"$schema": DRAFT, **schema, "$defs": {"one": {anchor: "named", **one}, "two": two}}

    def value(self, depth: int) -> Any:
        """A random JSON value."""
        kind = self.random.randint(0, 6 if depth else 4)
        if kind < 2:
            return self._of((None, True, False))
        if kind < 5:
            return self._of(NUMBERS if kind == 2 else TEXTS)
        inner = [self.value(depth - 1) for _ in range(self.random.randint(0, 3))]
        return inner if kind == 5 else dict(zip(self._names(3), inner, strict=False))

    def fitting(self, schema: Any, depth: int = 3) -> Any:
        """A value that the keywords of the schema suggest; often a valid one."""
        if not isinstance(schema, dict) or depth < 0 or self._chance(0.1):
            return self.value(1)
        for word in ("const", "enum", "allOf", "anyOf", "oneOf", "if", "then"):
            if word in schema and self._chance(0.8):
                found = schema[word] if isinstance(schema[word], list) else [schema[word]]
                held = self._of(found or [True])
                return held if word in ("const", "enum") else self.fitting(held, depth - 1)
        kinds = schema.get("type") or self._kind_of(schema)
        match self._of(kinds) if isinstance(kinds, list) else kinds:
            case "object":
                wanted = [n for n in schema.get("properties", {}) if self._chance(0.6)]
                wanted += schema.get("required", [])
                return {n: self.fitting(self._of_name(schema, n), depth - 1) for n in wanted}
            case "array":
                prefix = schema.get("prefixItems", [])
                count = self.random.randint(schema.get("minItems", 0), max(schema.get("maxItems", 3), schema.get("minItems", 0)))  # fmt: skip
                schemas = [*prefix, *[schema.get("items", schema.get("contains"))] * 4][:count]
                return [self.fitting(each, depth - 1) for each in schemas]
            case "string":
                return self._of(TEXTS)
            case "integer" | "number":
                low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -2))
                return self._of((low, low + 1, math.floor(low), *NUMBERS))
            case "boolean":
                return self._chance(0.5)
        return None

    @staticmethod
    def _of_name(schema: dict[str, Any], name: str) -> Any:
        return schema.get("properties", {}).get(name, schema.get("additionalProperties"))

    def _kind_of(self, schema: dict[str, Any]) -> str:
        kinds = [self._keywords[word][0] for word in schema if word in self._keywords]
        return self._of([kind for kind in kinds if kind != "any"] or TYPES)

    def _schema(self, depth: int) -> Any:
        if depth > 3 or self._chance(0.15):
            return self._of((True, False, {}, {"type": self._of(TYPES)}, {"const": self.value(1)}))
        return self._words(depth)

    def _words(self, depth: int) -> dict[str, Any]:
        """Mostly keywords of one type, as people write them."""
        schema: dict[str, Any] = {}
        kind = self._of(TYPES)
        if self._chance(0.6):
            schema["type"] = kind if self._chance(0.8) else sorted({kind, self._of(TYPES)})
        group = "number" if kind == "integer" else kind
        usual = [w for w, (of, _) in self._keywords.items() if of in (group, "any")]
        for _ in range(self.random.randint(1, 6)):
            word = self._of(usual if self._chance(0.85) else list(self._keywords))
            if word.startswith("$") and (depth < 2 or self._chance(0.7)):
                continue  # most would lead back without a step into the value
            schema[word] = self._keywords[word][1](depth + 1)
        return schema

    def _list(self, depth: int) -> list[Any]:
        return [self._schema(depth) for _ in range(self.random.randint(1, 3))]

    def _map(self, names: tuple[str, ...], depth: int) -> dict[str, Any]:
        count = self.random.randint(0, 3)
        return {name: self._schema(depth) for name in self.random.sample(names, count)}

    def _names(self, count: int = 2) -> list[str]:
        return self.random.sample(NAMES, self.random.randint(0, count))

    def _size(self) -> int:
        return self.random.randint(0, 3)

    def _chance(self, of_one: float) -> bool:
        return self.random.random() < of_one

    def _of(self, choices: Any) -> Any:
        return self.random.choice(choices)


class Judge:
    """``jsonschema`` as it is, and with exact numbers and patterns: only what both call invalid is
    certainly invalid."""

    def __init__(self, schema: dict[str, Any]) -> None:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        self._plain = jsonschema.Draft202012Validator(schema, format_checker=checker)
        self._exact = SchemaValidator(checkable(schema))

    def is_valid(self, text: str) -> bool:
        return self._plain.is_valid(json.loads(text)) or self._exact.first_error(text) is None


def fuzz(seed: int, facts: TokenizerFacts, counts: Counter[str]) -> list[str]:
    """The failures of the schema of a seed; adds to the counts."""
    maker = SchemaMaker(seed)
    schema = maker.make()
    texts = [json.dumps(maker.fitting(schema), ensure_ascii=False) for _ in range(8)]
    return failures_of(schema, texts, maker.random, facts, counts)


def failures_of(
    schema: dict[str, Any],
    texts: list[str],
    rng: random.Random,
    facts: TokenizerFacts,
    counts: Counter[str],
) -> list[str]:
    """What goes wrong with a schema: for the given values, and for random answers."""
    counts["schemas"] += 1
    begin = time.process_time()
    try:
        held = router(json.dumps(schema, ensure_ascii=False), facts)
    except Refused as error:
        reason = "no value" if "value satisfies" in str(error) else error.keyword
        counts[f"refused: {reason}"] += 1
        return []
    except Exception as error:
        return [f"the compiler raised {error!r}"]
    spent = time.process_time() - begin
    failures = [f"compiling took {spent:.1f} s"] if spent > SLOW_S else []
    counts["taken, with checks" if held.checks else "taken, exactly"] += 1
    judge = Judge(schema)
    for text in texts:
        accepted, valid = _accepts(held, text, facts), judge.is_valid(text)
        counts[f"values {'valid' if valid else 'invalid'}, {'accepted' if accepted else 'refused'}"] += 1  # fmt: skip
        if accepted and not valid:
            failures.append(f"accepts {text}")
    for _ in range(WALKS):
        walked = _walk(held, facts, rng)
        outcome = "unfinished"
        if walked is not None and not _is_json(walked):
            failures.append(f"writes {walked!r}, which is not JSON")
            continue
        if walked is not None and "Infinity" in json.dumps(json.loads(walked)):
            outcome = "with numbers beyond float64"
        elif walked is not None:
            outcome = "finished" if held.checks_pass(walked) else "refused by checks"
        counts[f"walks {outcome}"] += 1
        if walked is not None and outcome == "finished" and not judge.is_valid(walked):
            failures.append(f"writes {walked}")
    return failures


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _accepts(held: Held, text: str, facts: TokenizerFacts) -> bool:
    token_ids = [*facts.encode(text), facts.eos_token_ids[0]]
    try:
        taken = held.matcher.fork().advance(token_ids)
    except GrammarExhausted:
        return False
    return taken == len(token_ids) and held.checks_pass(text)


def _walk(held: Held, facts: TokenizerFacts, rng: random.Random) -> str | None:
    """A text of random tokens that the grammar allows, with more of those that end values; None if
    it did not end."""
    matcher, text = held.matcher.fork(), b""
    row = np.zeros_like(facts.eos_mask)
    try:
        for _ in range(MAX_TOKENS):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            ends = [each for each in allowed if each in facts.eos_token_ids]
            if ends and (rng.random() < 0.5 or len(allowed) == len(ends)):
                return text.decode()
            closing = [t for t in allowed if facts.tokens[t] in (b'"', b"}", b"]", b'"}', b'"]')]
            others = [t for t in allowed if t not in ends]
            if not others:
                return None
            token = rng.choice(closing if closing and rng.random() < 0.5 else others)
            if matcher.advance([token]) != 1:
                raise AssertionError(f"the mask allows token {token}, the matcher refuses it")
            text += facts.tokens[token]
    except GrammarExhausted:
        pass
    return None


def kept_failures() -> list[dict[str, Any]]:
    """``{seed, schema, texts}`` of each schema that failed once."""
    return [json.loads(line) for line in FAILURES.read_text("utf-8").splitlines()]


def main() -> int:
    """Read the arguments, fuzz, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="The first; each schema has the next.")
    arguments = parser.parse_args()
    facts = TokenizerFacts.from_folder(resolve_model_path(DEMO_MODEL))
    counts: Counter[str] = Counter()
    failed = 0

    def report(seed: int, schema: Any, failures: list[str]) -> None:
        nonlocal failed
        if failures:
            failed += 1
            listed = "\n  ".join(dict.fromkeys(failures))
            print(f"seed {seed}: {json.dumps(schema)}\n  {listed}", flush=True)

    for kept in kept_failures():
        schema, seed = kept["schema"], kept["seed"]
        found = failures_of(schema, kept["texts"], random.Random(seed), facts, counts)
        report(seed, schema, found)
    for seed in range(arguments.seed, arguments.seed + arguments.schemas):
        report(seed, SchemaMaker(seed).make(), fuzz(seed, facts, counts))
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count:8}")
    print(f"{'schemas that failed':40} {failed:8}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
