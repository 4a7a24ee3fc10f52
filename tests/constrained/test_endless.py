"""Grammars without a finite sentence are refused when they are compiled, for each kind and backend;
large ones are not."""

import json
from typing import Any

import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained.backends import llguidance
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import Constraint, Ebnf, JsonSchema, Lark, StructuralTag, Tag
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import MAX_FORCED
from tests.constrained.vocabularies import facts_of

SELF = {"$ref": "#"}
INSIDE = {"$ref": "#/$defs/a"}
INFINITE = {"type": "object", "properties": {"next": INSIDE}, "required": ["next"]}


def compiled(constraint: Constraint, **options: Any) -> Any:
    return compile_constraint(constraint, facts_of("byte_level_json"), CompileOptions(**options))


def refusal(constraint: Constraint, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        compiled(constraint, **options)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" | "b" tail\ntail ::= [a-z] tail', "tail"),
        ('root ::= "x" ("a" b)*\nb ::= ("b" | "c") c\nc ::= b{2,3}', "b"),
        ('root ::= "x" middle\nmiddle ::= "y" end\nend ::= "(" end ")"', "end"),
        ("root ::= a\na ::= b | b b\nb ::= a a", "a"),
    ],
)
def test_an_ebnf_rule_without_a_finite_text_is_named(grammar: str, rule: str) -> None:
    assert f"The rule '{rule}' has no finite text" in refusal(Ebnf(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" root | "b"',
        'root ::= "a" root?',
        'root ::= "a" root{0,2}',
        'root ::= "x" a*\na ::= "(" a ")" | ""',
        'root ::= "x"\nunused ::= "y" unused',
    ],
)
def test_an_ebnf_grammar_whose_recursion_may_end_is_taken(grammar: str) -> None:
    assert compiled(Ebnf(grammar=grammar)).grammar.backend == "llguidance"


ENDLESS_LARK = [
    ('start: "a" start', "start"),
    ('start: "a" | "b" tail\ntail: /[a-z]/ tail', "tail"),
    ('start: "x"i (a | "b")\n// c: "d"\na: "c" [b]\nb: ("x" b)+ | "y" b~2..3\n  | B b{1,2}\nB: "b"', "b"),
    ("start: %lark {\nstart: a\na: a a\n}\n", "a"),
    ('start: a::0x0\na::_ : "x" a::incr(_) | "y" a::decr(_) %if lt(_, 3)\n', "a"),
    ('start: x\n!?x[capture, stop="a: b"]: %regex {"substring_words": "a: b | c"} x -> y', "x"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "rule"), ENDLESS_LARK)
@pytest.mark.parametrize("in_tag", [False, True])
def test_a_lark_rule_without_a_finite_text_is_named(grammar: str, rule: str, in_tag: bool) -> None:
    constraint: Constraint = Lark(grammar=grammar)
    if in_tag:
        tag = Tag(begin="<a>", content=constraint, end="</a>")
        constraint = StructuralTag(tags=(tag,), triggers=("<a>",))
    assert f"The rule '{rule}' has no finite text" in refusal(constraint)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" [start]',
        'start: "a" start*',
        'start: "a" start~0..2',
        'start: "a" start{,2}',
        'start: "a" start{0,2} # start',
        'start: "a"\nunused: "a" unused',
        'start: a::0x0\na::_ : "x" a::incr(_) %if lt(_, 3)\n | "y"\n',
        "start: /[\\/|]/ | \"start: |\" | <[5-7]> start | STOP\nSTOP: /x/\n\n\n  | /y/",
        'start: %regex {"substring_words": "} start"} | %lark {\nstart: "(" start? ")"\n}\n',
    ],
)  # fmt: skip
def test_a_lark_grammar_whose_recursion_may_end_is_taken(grammar: str) -> None:
    assert compiled(Lark(grammar=grammar)).grammar.backend == "llguidance"


ENDLESS_SCHEMAS = [
    ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, "at the root"),
    ({"type": "array", "items": SELF, "minItems": 1}, "at the root"),
    ({"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2}, "at the root"),
    ({"type": "array", "contains": SELF}, "at the root"),
    ({"type": "object", "additionalProperties": SELF, "minProperties": 1}, "at the root"),
    ({"type": "object", "additionalProperties": SELF, "required": ["a"]}, "at the root"),
    ({"anyOf": [{"type": "array", "items": INSIDE, "minItems": 3}, INFINITE], "$defs": {"a": SELF}}, "at the root"),
    ({"type": "object", "properties": {"x": INSIDE}, "required": ["x"], "$defs": {"a": INFINITE}}, "/$defs/a"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
@pytest.mark.parametrize(("schema", "place"), ENDLESS_SCHEMAS)
def test_a_schema_of_infinite_values_is_refused(schema: Any, place: str, backend: Any) -> None:
    message = refusal(JsonSchema(schema=json.dumps(schema)), backend=backend)
    assert "No finite value satisfies it" in message and place in message


def test_a_schema_of_infinite_values_is_refused_in_a_tag() -> None:
    content = JsonSchema(schema=json.dumps(ENDLESS_SCHEMAS[0][0]))
    tag = Tag(begin="<a>", content=content, end="</a>")
    message = refusal(StructuralTag(tags=(tag,), triggers=("<a>",)))
    assert "No finite value satisfies it" in message and "<a>" in message


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"anyOf": [{"type": "null"}, INSIDE]}, "null", '{"next":'),
        ({"type": "object", "properties": {"b": {}, "a": INSIDE}}, '{"b": 1}', '{"a":'),
        ({"type": "array", "items": INSIDE}, "[]", "[{"),
        ({"type": "array", "prefixItems": [{"type": "null"}, INSIDE]}, "[null]", "[null,"),
        ({"oneOf": [INSIDE, {"type": "integer"}]}, "1", "{"),
    ],
)
def test_the_infinite_part_of_a_schema_is_never_begun(schema: Any, good: str, bad: str) -> None:
    facts = facts_of("byte_level_json")
    text = json.dumps({**schema, "$defs": {"a": INFINITE}})
    matcher = load_grammar(compiled(JsonSchema(schema=text)).grammar, facts)
    begun = facts.encode(bad)
    assert matcher.fork().advance(begun) < len(begun)
    ids = [*facts.encode(good), facts.eos_token_ids[0]]
    assert matcher.advance(ids) == len(ids)


def test_an_enormous_finite_grammar_is_taken_and_forces_a_bounded_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llguidance, "_FIRST_STEP_S", 60.0)  # a busy machine would refuse it
    levels = 40
    ebnf = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(levels)]
    lark = [f"r{i}: r{i + 1} r{i + 1}" for i in range(levels)]
    enormous = [
        Ebnf(grammar="\n".join(["root ::= r0", *ebnf, f'r{levels} ::= "a"'])),
        Lark(grammar="\n".join(["start: r0", *lark, f'r{levels}: "a"'])),
    ]
    for constraint in enormous:
        matcher = load_grammar(compiled(constraint).grammar, facts_of("byte_level_json"))
        assert 0 < len(matcher.forced_tokens()) <= MAX_FORCED


def test_an_attribute_of_lark_without_effect_is_refused() -> None:
    message = refusal(Lark(grammar='start: x\nx[temperature=0.5]: "a"'))
    assert "The rule 'x' has a temperature" in message
    assert compiled(Lark(grammar='start: temperature\ntemperature: "temperature=1"'))


def test_lark_in_a_tag_can_not_get_a_schema_around_the_checks() -> None:
    content = Lark(grammar='start: %json {"type": "string"}')
    tag = Tag(begin="<a>", content=content, end="</a>")
    assert "%json" in refusal(StructuralTag(tags=(tag,), triggers=("<a>",)))
    assert "%json" in refusal(content)
