"""Every kind of constraint is enforced exactly, or refused with a sentence."""

import json
import math
import random
import re

import msgspec
import numpy as np
import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained.backends import fsm
from radixrt.constrained.backends.lark import alternatives
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Choice,
    Constraint,
    Ebnf,
    Format,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Tag,
)
from radixrt.constrained.grammar import Compiled
from radixrt.constrained.json_schema.validation import SchemaValidator
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.constrained.vocabularies import KINDS, facts_of

each_kind = pytest.mark.parametrize("kind", sorted(KINDS))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"enum": ["x/y", 1]}},
    "required": ["a"],
}


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite-state machines are built in this process: a child is copied from it with torch and
    all."""
    monkeypatch.setattr(fsm, "_within_budget", lambda build: build())


def compiled(constraint: Constraint, facts: TokenizerFacts, **options: object) -> Compiled:
    return compile_constraint(constraint, facts, msgspec.convert(options, CompileOptions))


def ids_of(text: str, facts: TokenizerFacts) -> list[int]:
    """The tokens of a text in which control tokens stand for themselves."""
    names = "|".join(map(re.escape, facts.special_names))
    ids = []
    for piece in re.split(f"({names})", text):
        ids += [facts.special_names[piece]] if piece in facts.special_names else facts.encode(piece)
    return ids


def takes(constraint: Constraint, facts: TokenizerFacts, text: str, **options: object) -> bool:
    """Whether the answer may be this text, and end there."""
    matcher = load_grammar(compiled(constraint, facts, **options).grammar, facts)
    ids = [*ids_of(text, facts), facts.eos_token_ids[-1]]
    return matcher.advance(ids) == len(ids)


def refusal(constraint: Constraint, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        compiled(constraint, facts_of("byte_level_json"), **options)
    assert caught.value.status == 400 and caught.value.param == "structured"
    return caught.value.message


def test_where_each_kind_goes() -> None:
    facts = facts_of("byte_level_json")
    small = Choice(options=("yes", "no"))
    backends = {
        "llguidance": [
            JsonSchema(schema=json.dumps(SCHEMA)),
            AnyJson(),
            Lark(grammar='start: "a"'),
            Ebnf(grammar='root ::= "a"'),
            StructuralTag(
                tags=(Tag(begin="<a>", content=AnyText(), end="</a>"),), triggers=("<a>",)
            ),
        ],
        "fsm": [small, Regex(pattern="[0-9]{3}")],
    }
    for backend, specs in backends.items():
        for constraint in specs:
            assert compiled(constraint, facts).grammar.backend == backend
    assert compiled(small, facts, backend="llguidance").grammar.backend == "llguidance"


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("backend", ["auto", "llguidance", "fsm"])
@each_kind
def test_choices_are_taken_literally(kind: str, backend: str) -> None:
    facts = facts_of(kind)
    options = ("a b", "a.b", "é&~\n", "x/#-", "", "\U0001f600\\", "(?i)a", "^b$", "\t{2}", "[a-c]")
    constraint = Choice(options=options)
    for text in options:
        assert takes(constraint, facts, text, backend=backend), text
    for text in ("axb", "x", "A", "b", "a", "a b ", "\t\t"):
        assert not takes(constraint, facts, text, backend=backend), text


def test_alternatives_mean_in_re_what_they_mean_here() -> None:
    options = ["a.b", "x{2}", "\\", "a-b", "(", "é ", "~&#"]
    pattern = re.sub(
        r"\\x\{(\w+)\}", lambda m: re.escape(chr(int(m[1], 16))), alternatives(options)
    )
    assert [text for text in [*options, "axb", "xx"] if re.fullmatch(pattern, text)] == options


PATTERNS = [
    "^abc$",
    "^a|b$",
    "a.b",
    "(?i)ab",
    "[^a]",
    "\\d+",
    "a{2,3}?b",
    "\\x41|\\u0042",
    "[+-]?\\d",
]
TEXTS = ["abc", "a", "b", "ab", "aB", "axb", "a\nb", "٣", "12", "aab", "aaab", "A", "B", "+1", "\n"]


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_is_matched_against_the_whole_text_as_python_does(pattern: str) -> None:
    facts = facts_of("byte_level_json")
    for text in TEXTS:
        wrapped = f"(?:{pattern})" if "(?i)" not in pattern else pattern
        expected = re.fullmatch(wrapped, text, re.ASCII)
        assert takes(Regex(pattern=pattern), facts, text) == bool(expected), (pattern, text)


@pytest.mark.parametrize("pattern", ["\\d", "\\w", "\\s", "[\\d.]", "\\\\d", "[\\w-]", "\\s|\\d"])
def test_classes_mean_the_same_in_a_regex_in_a_tag_and_in_a_schema(pattern: str) -> None:
    facts = facts_of("byte_level_json")
    as_schema = JsonSchema(schema=json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"}))
    tag = Tag(begin="<a>", content=Regex(pattern=pattern), end="</a>")
    in_tag = StructuralTag(tags=(tag,), triggers=("<a>",), free_text=False)
    grammars = [
        compiled(each, facts).grammar for each in (Regex(pattern=pattern), in_tag, as_schema)
    ]
    for text in ("1", "٣", "a", "é", "-", ".", " ", "\xa0", "\u3000", "\\d", "_"):
        written = text, f"<a>{text}</a>", json.dumps(text, ensure_ascii=False)
        taken = []
        for grammar, answer in zip(grammars, written, strict=True):
            ids = [*ids_of(answer, facts), facts.eos_token_ids[0]]
            taken.append(load_grammar(grammar, facts).advance(ids) == len(ids))
        assert len(set(taken)) == 1, (text, taken)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "without lookahead"),
        ("\\bx", "without lookahead"),
        ("(a)\\1", "without references"),
        ("a$b", "without lookahead"),
        ("(", "unclosed group"),
        ("[^\\s\\S]", "Nothing"),
    ],
)
def test_what_a_regex_can_not_have_is_said(pattern: str, reason: str) -> None:
    assert reason in refusal(Regex(pattern=pattern))


@pytest.mark.parametrize(
    "constraint",
    [
        Choice(options=()),
        Lark(grammar="start: missing"),
        Ebnf(grammar="root ::= missing"),
        Ebnf(grammar='root ::= root "a"'),
        JsonSchema(schema="{"),
        JsonSchema(schema='{"$ref":"http://127.0.0.1:9/x"}'),
        Regex(pattern="a" * (17 << 20)),
    ],
    ids=lambda constraint: type(constraint).__name__,
)
def test_what_can_not_be_enforced_is_refused(constraint: Constraint) -> None:
    assert refusal(constraint)


def test_numbers_of_a_schema_are_written_as_the_same_float64() -> None:
    facts = facts_of("byte_level_json")
    generator = random.Random(19)
    numbers = [-1e-09, 8.710977417227167e-10, 8e-25, 5e-324, 0.1, 1e22, 0.30000000000000004]
    numbers += [generator.uniform(-1, 1) * 10 ** generator.randrange(-25, 15) for _ in range(60)]
    num_checked = 0
    for number in numbers:
        schema = {"const": number}
        result = compiled(JsonSchema(schema=json.dumps(schema)), facts)
        if result.checks:  # llguidance would read another number
            assert [check.keywords for check in result.checks] == [("const",)]
            num_checked += 1
            continue
        text = only_text(load_grammar(result.grammar, facts), facts)
        assert json.loads(text) == number, (number, text)
        assert SchemaValidator(schema).first_error(text) is None
        assert SchemaValidator({"enum": [1.5, [number]]}).first_error(f"[{text}]") is None
        near = math.nextafter(number, math.inf)
        assert SchemaValidator(schema).first_error(repr(near)) is not None
    assert num_checked < len(numbers) / 2


def only_text(matcher: Matcher, facts: TokenizerFacts) -> str:
    """What a grammar of one text writes."""
    text, row = b"", np.empty_like(facts.eos_mask)
    while not matcher.is_terminated():
        matcher.fill_mask(row)
        words = row.view(np.uint32)
        allowed = [i for i in range(facts.vocab_size) if words[i // 32] >> (i % 32) & 1]
        token_id = max(allowed, key=lambda i: len(facts.tokens[i]) * (i not in facts.special_ids))
        assert matcher.advance([token_id]) == 1
        text += facts.tokens[token_id]
    return text.decode()


def test_objects_of_many_optional_properties_do_not_exhaust_the_matcher() -> None:
    facts = facts_of("byte_level_json")
    names = [f"{'abcdefgh'[i % 8]}_{i}" for i in range(1000)]
    schema = {
        "type": "object",
        "properties": {name: {"type": ["string", "null"]} for name in names},
    }
    text = json.dumps({names[0]: "x", names[500]: None, names[999]: "y"})
    assert takes(JsonSchema(schema=json.dumps(schema)), facts, text)


def test_json_mode() -> None:
    facts = facts_of("byte_level_json")
    for text, is_object in [("{}", True), ('{"a": [1, null]}', True), ("[]", False), ("1", False)]:
        assert takes(AnyJson(), facts, text) == is_object
        assert takes(AnyJson(object_only=False), facts, text)
    assert not takes(AnyJson(), facts, "{'a': 1}")
    assert not takes(AnyJson(), facts, '{"a": 1}', whitespace="compact")


def test_ebnf_is_not_cut_into_lexemes() -> None:
    """A lexer that takes the longest piece would take ``abc`` here, and then not ``d``."""
    facts = facts_of("byte_level_json")
    constraint = Ebnf(grammar='root ::= [a-z]* "abc"')
    for text in ("abc", "xabc", "abcdabc", "ababc"):
        assert takes(constraint, facts, text)
    assert not takes(constraint, facts, "abcd")


GBNF = r"""
# comments, "quotes" in them
root   ::= list | . "\x41" "\u00e9" | ( "(" | ) "."{2}
list   ::=
  "[" gap (
            number
    ("," gap number)*
  )? "]" gap
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) gap
gap    ::= | " " | "\n" [ .|()\]]{0,20}
"""


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [("[]", True), ("[1, -20,3]\n|)", True), ("[ 1 ]", True), ("[,]", False), ("bAé", True), ("\nAé", True), ("Aé", False), ("..", True), ("(..", True), ("(.", False)],
)  # fmt: skip
def test_ebnf_has_the_forms_of_gbnf(text: str, is_taken: bool) -> None:
    assert takes(Ebnf(grammar=GBNF), facts_of("byte_level_json"), text) == is_taken


# ---------------------------------------------------------------- structural tags

CONTENTS: list[tuple[Format, list[str], list[str]]] = [
    (
        JsonSchema(schema=json.dumps(SCHEMA)),
        ['{"a":"é"}', '{"a": "b", "b": "x/y"}', '{"a":"</tool_cal"}'],
        ['{"a":1}', '{"\\u0061":1}', '{"a":"x","b":"x"}', '{  "a":"x"}', "", "{}"],
    ),
    (AnyJson(), ["{}", '{"x":[1,null]}'], ["[]", "1", ""]),
    (AnyJson(object_only=False), ["[]", "1"], ["", "x"]),
    (Choice(options=("a", "ab", "a/b")), ["a", "ab", "a/b"], ["b", "", "aab"]),
    (Regex(pattern="[a-z</]*/?"), ["", "a", "a</", "</a/"], ["A", "a>"]),
    (Regex(pattern="^a|b$"), ["a", "b"], ["ab", ""]),
    (Lark(grammar='start: "x" /[0-9]+/'), ["x12"], ["x", "12"]),
    (AnyText(), ["", "x<y>\n", "</tool"], []),
]


@each_kind
@pytest.mark.parametrize("case", CONTENTS, ids=lambda case: repr(case[0])[:40])
def test_the_content_of_a_tag_is_held_to_its_constraint(
    kind: str, case: tuple[Format, list[str], list[str]]
) -> None:
    """<tool_call> is text in some of the vocabularies, an added token or a control token in
    others."""
    content, good, bad = case
    facts = facts_of(kind)
    tag = Tag(begin="<tool_call>\n", content=content, end="\n</tool_call>")
    constraint = StructuralTag(tags=(tag,), triggers=("<tool_call>",))
    for text in good:
        assert takes(constraint, facts, f"Let me see. <tool_call>\n{text}\n</tool_call> Done."), (
            text
        )
    for text in bad:
        assert not takes(
            constraint, facts, f"Let me see. <tool_call>\n{text}\n</tool_call> Done."
        ), text


def two_tools(**settings: object) -> StructuralTag:
    tags = tuple(
        Tag(
            begin=f'<tool_call>{{"name": "{name}", "arguments": ',
            content=JsonSchema(schema=json.dumps({"type": kind})),
            end="}</tool_call>",
        )
        for name, kind in (("f", "integer"), ("g", "array"))
    )
    return StructuralTag(tags=tags, triggers=("<tool_call>",), **settings)  # type: ignore[arg-type]


F = '<tool_call>{"name": "f", "arguments": 12}</tool_call>'
G = '<tool_call>{"name": "g", "arguments": [1]}</tool_call>'


@each_kind
def test_free_text_can_not_write_a_trigger(kind: str) -> None:
    facts = facts_of(kind)
    constraint = two_tools()
    for text in ("", "Hello.", f"{F}", f"a {F} b {G}{F} c", f"<{F}", "<tool_cal", "a <tool_cals>"):
        assert takes(constraint, facts, text), text
    wrong = F.replace("12", "[1]"), G.replace("[1]", "12"), F.replace('"f"', '"h"')
    for text in ("<tool_call>", "a <tool_call> b", *wrong, f"a {F[:-3]}"):
        assert not takes(constraint, facts, text), text


@each_kind
def test_numbers_of_tags(kind: str) -> None:
    facts = facts_of(kind)
    for least, most in [(0, None), (1, None), (0, 1), (1, 1), (2, 3)]:
        constraint = two_tools(min_tags=least, max_tags=most)
        alone = two_tools(min_tags=least, max_tags=most, free_text=False, separator=",\n")
        for count in range(5):
            fits = least <= count and (most is None or count <= most)
            calls = [(F, G)[i % 2] for i in range(count)]
            assert takes(constraint, facts, "Well: " + " and ".join(calls)) == fits
            assert takes(alone, facts, ",\n".join(calls)) == fits
        assert not takes(alone, facts, f"Well: {F}")
        assert not takes(alone, facts, f"{F}{G}")


def test_the_first_place_where_a_trigger_stands_counts() -> None:
    facts = facts_of("byte_level_json")
    tag = Tag(begin="aab", content=Choice(options=("1",)), end="")
    constraint = StructuralTag(tags=(tag,), triggers=("aa",))
    assert takes(constraint, facts, "xaab1") and takes(constraint, facts, "aab1aab1")
    assert not takes(constraint, facts, "aaab1")


def test_several_triggers() -> None:
    facts = facts_of("byte_level_json")
    tags = (
        Tag(begin="<a>", content=Regex(pattern="[0-9]"), end="</a>"),
        Tag(begin="<b>", content=AnyText(), end="</b>"),
        Tag(begin="<c>?", content=Regex(pattern="[0-9?]*"), end="??"),
    )
    constraint = StructuralTag(tags=tags, triggers=("<a>", "<b>", "<c"))
    for text in ("<a>1</a><b><a>no tag</b>", "<c>?1??", "<c>????? <b>?</b>", "c <b></b>"):
        assert takes(constraint, facts, text), text
    for text in ("<a>x</a>", "<b>never closed", "<a>1</a><a>", "<c>?1?", "<c>1??"):
        assert not takes(constraint, facts, text), text


TAG = Tag(begin="<a>", content=AnyText(), end="</a>")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (StructuralTag(tags=(), triggers=()), "between 1"),
        (StructuralTag(tags=(TAG,), triggers=()), "must begin with one trigger"),
        (StructuralTag(tags=(TAG,), triggers=("<a", "<a>")), "does with 2"),
        (StructuralTag(tags=(TAG,), triggers=("<a>", "<b>")), "<b>"),
        (StructuralTag(tags=(TAG,), triggers=("<a>", "")), "trigger"),
        (StructuralTag(tags=(TAG,), triggers=("<a>",), min_tags=2, max_tags=1), "From 2 to 1"),
        (StructuralTag(tags=(TAG,), triggers=("<a>",), max_tags=0), "From 0 to 0"),
        (
            StructuralTag(
                tags=(TAG, Tag(begin="<a>?", content=AnyJson(), end="?")), triggers=("<a>",)
            ),
            "begins like",
        ),
        (
            StructuralTag(tags=(Tag(begin="<a>", content=AnyText(), end=""),), triggers=("<a>",)),
            "needs an end",
        ),
        (
            StructuralTag(
                tags=(Tag(begin="<a>", content=Regex(pattern="a)|(b"), end="</a>"),),
                triggers=("<a>",),
            ),
            "regex",
        ),
        (
            StructuralTag(
                tags=(Tag(begin="<a>", content=Ebnf(grammar='root ::= "a"'), end="</a>"),),
                triggers=("<a>",),
            ),
            "EBNF",
        ),
        (
            StructuralTag(
                tags=(
                    Tag(
                        begin="<a>",
                        content=JsonSchema(schema='{"type":"array","uniqueItems":true}'),
                        end="0</a>",
                    ),
                ),
                triggers=("<a>",),
            ),
            "uniqueItems",
        ),
    ],
)
def test_tags_that_can_not_be_held_to_are_refused(constraint: StructuralTag, reason: str) -> None:
    assert reason in refusal(constraint)


def test_a_content_can_not_switch_checks_off() -> None:
    schema = json.dumps({"x-guidance": {"lenient": True}, "type": "integer", "not": {"const": 1}})
    tag = Tag(begin="<a>", content=JsonSchema(schema=schema), end="</a>")
    assert refusal(StructuralTag(tags=(tag,), triggers=("<a>",)))
    with_slash = JsonSchema(schema='{"x-guidance":{"whitespace_pattern":"[^}]*"},"type":"array"}')
    constraint = StructuralTag(
        tags=(Tag(begin="<a>", content=with_slash, end="</a>"),), triggers=("<a>",)
    )
    try:
        assert not takes(constraint, facts_of("byte_level_json"), "<a>[ nonsense ]</a>")
    except RequestError as error:
        assert "x-guidance" in error.message
