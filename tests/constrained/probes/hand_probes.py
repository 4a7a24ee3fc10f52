"""Probes of the uses of keywords that no rule makes: logic, references, values, numbers that are
hard, patterns, formats."""

import json
from collections.abc import Iterator
from typing import Any

from radixrt.constrained.json_schema.enforced import pattern_constructs
from radixrt.constrained.json_schema.formats import format_pattern
from radixrt.constrained.json_schema.patterns import portable
from tests.constrained.probes.probes import ALL_TEXTS, NUMBERS, OBJECTS, SAMPLES, Probe, texts_of


def by_hand() -> Iterator[Probe]:
    """All of them, in a fixed order."""
    yield from _types()
    yield from _logic()
    yield from _references()
    yield from _values()
    yield from _hard_numbers()
    yield from _names()
    yield from _patterns()
    yield from _formats()


def _types() -> Iterator[Probe]:
    yield Probe("any/true", True, ALL_TEXTS)
    yield Probe("any/empty", {}, ALL_TEXTS)
    forbidden: dict[str, Any] = {"type": "object", "properties": {"a": False, "b": {}}}
    yield Probe("any/false", forbidden, OBJECTS)
    yield Probe("any/false", {"type": "array", "items": False}, ALL_TEXTS)
    for type_name in ("null", "boolean"):
        yield Probe(f"{type_name}/", {"type": type_name}, (*ALL_TEXTS, "True"))
    several: list[dict[str, Any]] = [
        {"minLength": 2}, {"pattern": "^a"}, {"minimum": 2}, {"multipleOf": 2}, {"items": {"type": "integer"}}, {"minItems": 1},
        {"required": ["a"]}, {"properties": {"a": {"type": "string"}}}, {"additionalProperties": False}, {"maxProperties": 1},
        {"minimum": 2, "minLength": 2}, {"required": ["a"], "minItems": 1, "maximum": 3},
    ]  # fmt: skip
    for schema in several:
        yield Probe("any/type:missing", schema, (*ALL_TEXTS, '"ab"', '["a"]'))
        for types in (
            ["object", "null"],
            ["string", "integer"],
            ["string", "array", "object"],
            ["number", "object"],
        ):
            yield Probe(
                "any/type:several", {"type": types, **schema}, (*ALL_TEXTS, '"ab"', '["a"]')
            )


_OBJECT_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_OBJECT_B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}


def _logic() -> Iterator[Probe]:
    branches: list[list[Any]] = [
        [{"type": "string"}, {"type": "integer"}],
        [{"type": "string", "minLength": 2}, {"type": "null"}],
        [_OBJECT_A, _OBJECT_B],
        [{**_OBJECT_A, "additionalProperties": False}, {**_OBJECT_B, "additionalProperties": False}],
        [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}],
        [{"type": "number"}, {"type": "integer"}],
        [{"const": "a"}, {"const": "b"}],
        [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}],
        [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}],
        [{}, {"type": "string"}],
        [{"pattern": "b$"}, {"pattern": "^(?:ab)+$"}],
    ]  # fmt: skip
    siblings: list[dict[str, Any]] = [
        {"type": "object", "properties": {"c": {"type": "integer"}}}, {"type": "object", "required": ["b"]}, {"type": "object", "additionalProperties": False},
        {"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}, {"minimum": 3}, {"enum": ["a", 2, 3]}, {"type": "array", "maxItems": 1},
        {"type": "string", "pattern": "^a"},
    ]  # fmt: skip
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in branches:
            yield Probe(f"any/{keyword}", {keyword: branch}, ALL_TEXTS)
            for beside in siblings:
                yield Probe(f"any/{keyword}+siblings", {**beside, keyword: branch}, ALL_TEXTS)
    for excluded in ({"type": "string"}, {"const": 1}, {"required": ["a"]}, {"minimum": 2}):
        yield Probe("any/not", {"not": excluded}, ALL_TEXTS)
        yield Probe(
            "any/not+siblings",
            {"type": ["object", "string", "integer"], "not": excluded},
            ALL_TEXTS,
        )
    for condition in ({"type": "string"}, {"required": ["a"]}):
        schema = {
            "if": condition,
            "then": {"minLength": 2, "required": ["b"]},
            "else": {"type": "integer"},
        }
        yield Probe("any/if", schema, ALL_TEXTS)
        yield Probe(
            "any/if+siblings", {"type": ["object", "string", "integer"], **schema}, ALL_TEXTS
        )


def _references() -> Iterator[Probe]:
    definitions: dict[str, Any] = {
        "number": {"type": "integer", "maximum": 5},
        "list": {"type": "object", "properties": {"a": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}}, "required": ["a"], "additionalProperties": False},
        "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/either"}}]},
    }  # fmt: skip
    nested = (
        '{"a":1,"next":{"a":2}}', '{"a":1,"next":{}}', '{"a":1,"next":{"a":1,"next":{"a":"x"}}}', '{"a":1,"next":{"a":1,"next":{"a":3}}}', "[[]]", "[[],[]]", "[[],[],[]]",
        "[[],[[],[],[]]]", "[[1],2]", '[[["a"]]]', "[[[1]]]",
    )  # fmt: skip
    for name in definitions:
        schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
        yield Probe("any/$ref", schema, (*ALL_TEXTS, *nested))
        for beside in (
            {"minimum": 2},
            {"maxItems": 1},
            {"required": ["next"]},
            {"type": ["array", "integer"]},
        ):
            yield Probe("any/$ref+siblings", {**beside, **schema}, (*ALL_TEXTS, *nested))
    inside = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/number"}},
        "additionalProperties": False,  # an open object is judged on its own
        "$defs": definitions,
    }
    yield Probe("any/$ref", inside, (*OBJECTS, '{"a":6}'))


def _values() -> Iterator[Probe]:
    kinds: dict[str, list[Any]] = {
        "string": ["a", "é", "a/b", "😀", ""], "string:escaped": ['a"b', "a\\b", "a\nb", "\t"], "string:control": ["\x01", "a\x1fb", "\x7f", "a\x00b"],
        "number": [1, -3, 0, 1000], "number:fraction": [1.5, -0.25], "number:tiny": [1e-20, 0.1234567890123], "number:huge": [2**60 + 1, 10**25], "number:rounded": [8.710977417227167e-10, 8e-25],
        "boolean": [True, False], "null": [None], "empty": [[], {}], "array": [[1, "a"], [[1], {"a": 2}]],
        "object": [{"a": 1}, {"a": 1, "b": [1, {"c": None}]}], "object:escaped": [{'a"': 1}, {"b\n": 2}],
    }  # fmt: skip
    others = (
        "1",
        "1.0",
        '"b"',
        "true",
        "null",
        "[]",
        "{}",
        "[1]",
        '{"a":1}',
        '{"a":1,"b":2}',
        '"\x01"',
        '"a',
        "1.50",
        '"ab"',
        '"\\u0061"',
        str(2**60),
        str(2**60 + 2),
        "0.0000000008710977417227165",
        "0.0000000000000000000000007999999999999999",
    )
    for kind, values in kinds.items():
        texts = (*texts_of(values), *others)
        yield Probe(f"value/{kind}", {"enum": values}, texts)
        for value in values:
            yield Probe(f"value/{kind}", {"const": value}, texts)
    mixed: list[Any] = ["a", 1, None, True, [1], {"a": 1}]
    texts = (*texts_of(mixed), *others)
    yield Probe("any/enum", {"enum": mixed}, texts)
    yield Probe("any/const", {"const": 1}, texts)
    for types in (
        "string",
        "integer",
        "object",
        ["string", "null"],
        ["array", "object"],
        "boolean",
        "number",
    ):
        yield Probe("any/enum+type", {"type": types, "enum": mixed}, texts)
    yield Probe("any/const+type", {"type": "string", "const": "a"}, texts)
    yield Probe("any/const+type", {"type": ["array", "object"], "const": [1]}, texts)
    sibling: list[dict[str, Any]] = [{"minLength": 2}, {"type": "string", "pattern": "^b"}, {"minimum": 2}, {"required": ["b"]}, {"const": "a"}, {"type": "object", "maxProperties": 0}]  # fmt: skip
    for beside in sibling:
        yield Probe(
            "any/enum+siblings",
            {**beside, "enum": [*mixed, "bb", 2, {"b": 1}]},
            (*texts, '"bb"', "2", '{"b":1}'),
        )
        yield Probe(
            "any/const+siblings", {**beside, "enum": ["a", "bb"], "const": "bb"}, (*texts, '"bb"')
        )


def _hard_numbers() -> Iterator[Probe]:
    hard = {
        "fraction": (0.1, 2.75, -0.5),
        "tiny": (1e-7, 0.12345678901, 3.3333333333333335),
        "huge": (2**53 + 1, 1e30, -(2**60) - 1, 1e308),
    }
    texts = (
        *NUMBERS, "0.09", "0.2", "0.12345678901", "0.123456789", "0.12345678902", "3.3333333333333333", "3.3333333333333335", "3.3333333333333337", "3.34", "0.0000001", "0.00000005",
        "0.0000002", *(str(n + d) for n in (2**53, 2**60, -(2**60), 10**30) for d in (-2, -1, 0, 1, 2)), "1" + "0" * 308, "2" + "0" * 308, "2.74", "2.76", "5.5", "8.25", "-0.25", "-1.25",
    )  # fmt: skip
    for type_name in ("integer", "number"):
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            for variant, bounds in hard.items():
                for bound in bounds:
                    if keyword == "multipleOf" and bound < 0:
                        continue
                    schema = {"type": type_name, keyword: bound}
                    multiples = texts_of([bound, 2 * bound] if isinstance(bound, int) else [])
                    yield Probe(f"{type_name}/{keyword}:{variant}", schema, (*texts, *multiples))
        for both_bounds in (
            {"minimum": 0.1, "maximum": 2.75},
            {"exclusiveMinimum": 0.1, "exclusiveMaximum": 0.3},
            {"minimum": -0.5, "exclusiveMaximum": 0.5},
        ):
            schema = {"type": "number", **both_bounds}
            yield Probe(f"number/{next(iter(both_bounds))}:fraction", schema, texts)
    for whole, other in ((0, 0.5), (2, 2.25), (10, 10.01), (-10, -9.5), (0, -0.5), (1, 0.5), (-10, -10.25), (0, 1e-09), (0, -1e-09)):  # fmt: skip
        limited, limit = ("Minimum", "maximum") if whole < other else ("Maximum", "minimum")
        schema = {"type": "number", f"exclusive{limited}": whole, limit: other}
        near = texts_of([whole, float(whole), other, (whole + other) / 2])
        yield Probe(f"number/exclusive{limited}:near", schema, (*texts, *near, ""))
    for step in (0.01, 0.1, 0.25, 1.5):
        yield Probe("number/multipleOf:fraction", {"type": "number", "multipleOf": step}, texts)
        both = {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": step}
        yield Probe("number/multipleOf:fraction", both, texts)


def _names() -> Iterator[Probe]:
    for name in ('"', "\\", "\n", "a\tb", 'a"b'):
        texts = texts_of([{}, {name: 1}, {name: "x"}, {"a": 1}, {name: 1, "z": 1}])
        properties = {"type": "object", "properties": {name: {"type": "integer"}}}
        yield Probe("properties/name:escaped", properties, texts)
        yield Probe("properties/name:escaped", {**properties, "additionalProperties": False}, texts)
        yield Probe("required/name:escaped", {"type": "object", "required": [name]}, texts)
    for name in ("a\x00b", "\x01", "\x1f"):
        bare = name.replace("\x00", "").replace("\x01", "").replace("\x1f", "")
        texts = texts_of([{}, {name: 1}, {name: "x"}, {bare: 1}, {bare: "x"}])
        properties = {"type": "object", "properties": {name: {"type": "integer"}}}
        yield Probe("properties/name:control", properties, texts)
        yield Probe("properties/name:control", {**properties, "additionalProperties": False}, texts)
        yield Probe("required/name:control", {"type": "object", "required": [name]}, texts)
    for name in ("é", "😀", "a/b", "a~b", "", "$ref", "x.y", "a b", "\x7f"):
        texts = texts_of([{}, {name: 1}, {name: "x"}, {"q": 1}, {name: 1, "z": 1}])
        yield Probe(
            "object/properties",
            {"type": "object", "properties": {name: {"type": "integer"}}},
            texts,
        )


_SUBJECTS = (
    "", "a", "b", "c", "ab", "ba", "abc", "aab", "abab", "ac", "bc", "A", "Z", "_", "-", "0", "3", "10", "a1", "a.b", "a b", " ", "\t", "\n", "a\n", "\na", "\r", "é", "É", "😀", "٣",
    "\xa0", "\u2028", "\ufeff", "\x85", "\x0b", "\x7f", "\\", '"', "\\a", 'a"b', "/", "a" * 3, "a" * 12, "[", "]", "^", "$", "&", "~", ".", "x-c", "foo", "foobar", "barfoo", "a foo b", "a|b", "{", "aa", "²", "‿", "\u0301",
)  # fmt: skip
PATTERNS: dict[str, tuple[str, ...]] = {
    "literal": ("a", "^a$", "", "^abc$", "\\.", "^\\^$", "\\\\", "\\/", '"', "\\[", "\\$", "x\\-c", "^\\{$"),
    "character-beyond-ascii": ("é", "^😀$", "\\u00e9", "^[à-ÿ]$", "\\u{1F600}"), "character-control": ("\\n", "^\\t$", "a\\n", "[\\n]", "\n", "^[\\x00-\\x1f]b$", "^[\\n]$"),
    "character-unwritable": ("^\\x0b$", "^a\\x01b$", "a\\0b", "^a[\\x01]b$"),
    "dot": ("^.$", "a.b", "^.{2}$", "^.*$", ".+"), "class": ("^[ab]$", "[a-c]", "^[A-Z_]+$", "^[\\]\\[]$", "[.]", "^[&~-]+$", "[\\^a]", '^["a]$', '^["\\\\]+$', "^[\\\\a]*$", "^[!-a]$", "^[\\x00-!]$", "^[\\x00-\\x1f\\[-~]*$"),
    "negated-class": ("^[^a]$", "^[^ab]+$", "^[^a-z]*$", "[^\\n]", '^[^"]$', '^[^"]*$', "^[^\\\\]+$", '^[^"\\\\]*$', '^[^\\x00-\\x1f"]+$', '^(?:[^"])+$'), "empty-class": ("[]", "[^]"),
    "escape-d": ("^\\d$", "\\d+", "^[\\da]+$", "^[^\\d]$"), "escape-D": ("^\\D$", "^[\\D]+$", "^[^\\D]$"), "escape-w": ("^\\w$", "^[\\w-]+$", "^[^\\w]$"), "escape-W": ("^\\W$", "^[\\W]$", "^[^\\W]$"),
    "escape-s": ("^\\s$", "a\\sb", "^[\\s]$", "^[^\\s]$"), "escape-S": ("^\\S$", "^\\S+$", "^[^\\S]$"), "property": ("^\\p{L}$", "^\\p{Lu}$", "^\\P{L}$"),
    "group": ("^(a)(b)$", "(?:a)b", "^(ab)+$", "^(?<x>a)$"), "alternation": ("a|b", "^(a|b)$", "^a|b$", "^(ab|ba)+$", "^a$|^b$", "^(?:a|)$", "|a"),
    "repeat": ("^a*$", "^a+b?$", "^a{2}$", "^a{2,}$", "^a{1,2}$", "^(ab){2}$", "^(ab+)?$", "^(?:a*b*)*$", "^a{0}$"), "lazy": ("^a*?b$", "a+?", "^a??b$"), "long-repeat": ("^a{2,2000}$", "^.{0,1200}$"),
    "anchor": ("^a", "a$", "^", "$", "^(a)$", "^(?:a|b)c$"), "anchor-inside": ("(^a|b)c", "a(b$|c)", "a$b", "(^|b)a", "a(b|$)"),
    "word-boundary": ("\\bfoo\\b", "foo\\b", "\\Bfoo"), "lookahead": ("^(?=a)", "^(?!a)", "a(?!b)"), "lookbehind": ("(?<=a)b", "(?<!a)b"), "backreference": ("^(a|b)\\1$",),
}  # fmt: skip


def _patterns() -> Iterator[Probe]:
    """Each in the portable form, as it is handed to a grammar; Python and the original say what is
    valid."""
    import re

    texts = tuple(dict.fromkeys(json.dumps(subject, ensure_ascii=False) for subject in _SUBJECTS))
    for name, patterns in PATTERNS.items():
        for pattern in patterns:
            assert name in pattern_constructs(pattern), (name, pattern)
            try:
                written = portable(pattern)
            except ValueError:
                written = pattern
            try:
                judge = re.compile(_for_python(pattern))
            except re.error:
                continue
            known = {text: bool(judge.search(json.loads(text))) for text in texts}
            unsure = frozenset(
                text
                for text in texts
                if not json.loads(text).isascii()
                or any(c < " " or c == "\x7f" for c in json.loads(text))
            )
            yield Probe(
                f"pattern/{name}", {"type": "string", "pattern": written}, texts, known, unsure
            )
            pairs = {f"{{{text}:1}}": valid for text, valid in known.items()}
            schema = {
                "type": "object",
                "patternProperties": {written: {"type": "integer"}},
                "additionalProperties": False,
            }
            hard = frozenset(f"{{{text}:1}}" for text in unsure)
            yield Probe(f"patternProperties/{name}", schema, tuple(pairs), pairs, hard)
    two: dict[str, Any] = {"^a": {"type": "integer"}, "b$": {"minimum": 2}}
    texts = texts_of(
        [
            {"a": 1},
            {"a": "x"},
            {"b": 1},
            {"b": 3},
            {"ab": 1},
            {"ab": 3},
            {"ab": "x"},
            {"b": "x"},
            {"a": 1, "b": 2},
        ]
    )
    for several in (two, {"^a": {"type": "integer"}, "^b": {"type": "string"}}):
        yield Probe(
            "patternProperties/several", {"type": "object", "patternProperties": several}, texts
        )
        yield Probe(
            "patternProperties/several",
            {"type": "object", "patternProperties": several, "additionalProperties": False},
            texts,
        )


def _for_python(pattern: str) -> str:
    for ecma, python in (
        ("(?<x>", "(?P<x>"),
        ("\\u{1F600}", "\\U0001F600"),
        ("\\p{Lu}", "[A-ZÉ]"),
        ("\\p{L}", "[^\\W\\d_²‿]"),
        ("\\P{L}", "[\\W\\d_²‿]"),
    ):
        pattern = pattern.replace(ecma, python)
    return pattern


FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (("2024-02-29", "2023-12-31", "2000-02-29"), ("2023-02-29", "1900-02-29", "2023-13-01", "2023-1-1", "2023-04-31", "23-01-01", "2023-01-01T", "٢٠٢٣-01-01", "0000-01-01")),
    "time": (("12:00:00Z", "23:59:59.123+01:00", "00:00:00-00:30"), ("24:00:00Z", "12:00:00", "12:60:00Z", "12:00Z", "12:00:00+24:00", "12:00:61Z", "22:59:60Z")),
    "date-time": (("2024-02-29T12:00:00Z", "2023-01-01T00:00:00.5+05:30"), ("2023-02-29T12:00:00Z", "2023-01-01", "2023-01-01 00:00:00Z", "2023-01-01T00:00:00", "2023-01-01T22:59:60Z", "1900-02-29T00:00:00Z")),
    "duration": (("P1D", "PT1H", "P1Y2M3DT4H5M6S", "P2W", "PT0S"), ("P", "PT", "1D", "P1Y2W", "P1DT", "P1H", "PT1D", "P1S", "p1d", "P1YT1D")),
    "email": (("a@b.c", "joe.bloggs@example.com", "a+b@c-d.org"), ("a", "@b", "a@", "a b@c", ".a@b.c", "a..b@c.d", "a@b@c", "a@-b.c")),
    "hostname": (("a", "www.example.com", "a-b.c1"), ("-a", "a-", "a..b", "a_b", "", "a b", "a" * 64, ".".join(["a" * 60] * 5), "xn--X", "aa--b", ".a", "a.")),
    "ipv4": (("1.2.3.4", "255.255.255.255", "0.0.0.0"), ("256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.4/8", "1.2.3.٣", "")),
    "ipv6": (("::", "::1", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::"), ("1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", ":1", "::1%eth0", "::g", "::256.1.1.1", "1:2:3:4:5:6:7:1.2.3.4", "")),
    "uri": (("http://a.b/c?d=e#f", "mailto:a@b", "urn:x:y", "http://[::1]:80/"), ("a/b", "//a/b", "", "http://a b", "http://a\\b", "1a:b", "http://[::g]", "http://a/<b>", "http://a/%zz", "\u017f://a", "http://é")),
    "uuid": (("123e4567-e89b-12d3-a456-426614174000", "00000000-0000-0000-0000-000000000000"), ("123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400", "g23e4567-e89b-12d3-a456-426614174000", "{123e4567-e89b-12d3-a456-426614174000}")),
    "uri-reference": (("", "a/b", "#x", "//h/p", "http://a"), ("a b", "\\", "1a:b", "%zz", "a\nb")), "iri": (("http://é.b/ü",), ("é", "http://a b", "")), "iri-reference": (("é/ü", ""), ("a b", "\\")),
    "idn-email": (("a@b.c",), ("a", "@", "a b@c")), "idn-hostname": (("a.b",), ("-a", "a..b", "", "a b")), "uri-template": (("http://a/{b}",), ("http://a/{b",)),
    "json-pointer": (("", "/a/b", "/a~0b~1", "/"), ("a", "/a~", "/~2", "#/a")), "relative-json-pointer": (("0", "1/a", "2#"), ("/a", "01", "-1/a", "0##")), "regex": (("a+",), ("(", "[")),
}  # fmt: skip


def _formats() -> Iterator[Probe]:
    """By name, and as the pattern that takes its place."""
    for name, (valid, invalid) in FORMATS.items():
        known = {json.dumps(text, ensure_ascii=False): True for text in valid}
        known |= {json.dumps(text, ensure_ascii=False): False for text in invalid}
        yield Probe(
            f"format/{name}", {"type": "string", "format": name}, (*known, *SAMPLES[1:]), known
        )
        pattern = format_pattern(name)
        if pattern:
            schema: dict[str, Any] = {"type": "string", "pattern": portable(pattern)}
            if name == "hostname":
                schema["maxLength"] = 253
            yield Probe(f"format-pattern/{name}", schema, (*known, *SAMPLES[1:]), known)
