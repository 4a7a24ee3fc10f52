"""Each format of a structural tag accepts the texts of a regular expression of Python, and random
answers are among them."""

import functools
import random
import re
from typing import Any

import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.structural_tags import structural_tag
from tests.constrained.fuzz_schemas import _walk
from tests.constrained.test_compilation import takes
from tests.constrained.vocabularies import facts_of

FACTS = facts_of("byte_level_json")


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def row(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


DIGIT = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
LIST = {"type": "json_schema", "json_schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}}  # fmt: skip
CALL = tag("<f>", {"type": "json_schema", "style": "qwen_xml", "json_schema": {"properties": {"a": {"enum": [1, 2]}, "s": {"type": "string", "maxLength": 3}}}}, "</f>")  # fmt: skip
A_CALL = r"<f>(?:<parameter=a>\n[12]\n</parameter>\n)?(?:<parameter=s>\n[\s\S]{0,3}\n</parameter>\n)?</f>"
GAP = r"(?: |\n(?:[ ]{0,32}|\t{0,8}))?"
A_LIST = rf"\[{GAP}(?:[12](?:{GAP},{GAP}[12])?)?{GAP}\]"
ANY = {"type": "any_text"}
F, G = tag("<f>", DIGIT, "</f>"), tag("<g>", LIST, "</g>")
F_OR_G = rf"(?:<f>[0-9]</f>|<g>{A_LIST}</g>)"
FREE = r"(?:(?!<[fg]>)[\s\S])*"
TAGS = {"tags": [F, G], "triggers": ["<f", "<g"]}

CASES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    ("sequence", row(const("a"), DIGIT, const("b")), "a[0-9]b", ["a5b"], ["a5", "ab", "a55b"]),
    ("regular runs", row(regex("[ab]*"), const("b"), regex("b?c")), "[ab]*bb?c", ["bc", "abbc", "bbbc"], ["ac", "c"]),
    ("tags in a row", row(tag("<t>", ANY, "</t>"), const("\n"), G), rf"<t>(?:(?!</t>)[\s\S])*</t>\n<g>{A_LIST}</g>",
        ["<t>x</t>\n<g>[1,2]</g>", "<t></t>\n<g>[]</g>"], ["<t>x</t><g>[1]</g>", "<t>x</t>\n<g>[3]</g>", "<t></t></t>\n<g>[]</g>"]),
    ("thought, then tags", row(tag("<t>", ANY, "</t>"), {"type": "triggered_tags", **TAGS}), rf"<t>(?:(?!</t>)[\s\S])*</t>(?:{FREE}{F_OR_G})*(?:(?!<f|<g)[\s\S])*",
        ["<t>x</t>", "<t></t>hi <f>3</f> and <g>[1]</g>."], ["<t>x", "<t></t><f>12</f>", "<t></t><f"]),
    ("or", either(F, G, const("none")), f"(?:{F_OR_G}|none)", ["<f>1</f>", "<g>[2]</g>", "none"], ["", "<f>[1]</f>", "nonenone"]),
    ("optional", row({"type": "optional", "content": F}, const("x")), "(?:<f>[0-9]</f>)?x", ["x", "<f>0</f>x"], ["", "<f>0</f><f>0</f>x"]),
    ("star", {"type": "star", "content": either(F, const("-"))}, "(?:<f>[0-9]</f>|-)*", ["", "-", "--<f>0</f>-"], ["<f>", "x"]),
    ("plus", {"type": "plus", "content": LIST}, f"(?:{A_LIST}{GAP})+", ["[1]", "[1][2,1]"], ["", "[1],[1]"]),
    ("repeat", {"type": "repeat", "content": row(LIST, const(";")), "min": 2, "max": 3}, f"(?:{A_LIST};){{2,3}}",
        ["[];[];", "[1];[];[2];"], ["[];", "[];[];[];[];"]),
    ("repeat without end", {"type": "repeat", "content": F, "min": 1, "max": -1}, "(?:<f>[0-9]</f>)+", ["<f>0</f>", "<f>0</f>" * 9], [""]),
    ("two ends", tag("<n>", DIGIT, ["</n>", "!"]), "<n>[0-9](?:</n>|!)", ["<n>1</n>", "<n>1!"], ["<n>1", "<n>1</n>!"]),
    ("text up to two ends", tag("<n>", ANY, ["</n>", "!"]), r"<n>(?:(?!</n>|!)[\s\S])*(?:</n>|!)", ["<n></n>", "<n>a!"], ["<n>a", "<n>a!!", "<n>a!</n>"]),
    ("text without", tag("<n>", {"type": "any_text", "excludes": ["ab", "c"]}, "</n>"), r"<n>(?:(?!</n>|ab|c)[\s\S])*</n>", ["<n>bad</n>"], ["<n>abc</n>", "<n>c</n>"]),
    ("any text without", {"type": "any_text", "excludes": ["ab", "c"]}, r"(?:(?!ab|c)[\s\S])*", ["", "bad"], ["abd", "c"]),
    ("triggered without", {"type": "triggered_tags", **TAGS, "excludes": ["no"], "at_least_one": True}, rf"(?:(?:(?!no){FREE[3:-2]})*{F_OR_G})+(?:(?!no|<f|<g)[\s\S])*",
        ["a <f>1</f> n", "<g>[1]</g>"], ["no <f>1</f>", "<f>1</f>no", "a"]),
    ("tags in a tag", tag("<calls>", {"type": "triggered_tags", **TAGS}, "</calls>"), rf"<calls>(?:(?:(?!</calls>){FREE[3:-2]})*{F_OR_G})*(?:(?!</calls>|<f|<g)[\s\S])*</calls>",
        ["<calls></calls>", "<calls>x<f>1</f> <g>[1]</g></calls>"], ["<calls><f>1</f>", "<calls></calls>x", "<calls>a</calls><f>1</f></calls>"]),
    ("separated tags in a tag", tag("<calls>", {"type": "tags_with_separator", "tags": [F, G], "separator": ","}, "</calls>"), f"<calls>(?:{F_OR_G}(?:,{F_OR_G})*)?</calls>",
        ["<calls></calls>", "<calls><f>1</f>,<f>2</f></calls>"], ["<calls>,</calls>", "<calls><f>1</f><f>2</f></calls>"]),
    ("dispatch", {"type": "dispatch", "rules": [["#", DIGIT], ["@", const("me")]]}, r"(?:[^#@]*(?:#[0-9]|@me))*[^#@]*", ["", "x #1, @me.", "#5"], ["#", "#x", "@you"]),
    ("dispatch once", tag("(", {"type": "dispatch", "rules": [["#", DIGIT]], "loop": False, "excludes": ["y"]}, ")"), r"\((?:[^#)y]*#[0-9])?[^#)y]*\)",
        ["()", "(x#1)"], ["(#1#1)", "(y)", "(#)"]),
    ("parameters", CALL, A_CALL, ["<f></f>", "<f><parameter=a>\n1\n</parameter>\n<parameter=s>\n</f\n</parameter>\n</f>"],
        ["<f>1</f>", "<f><parameter=a>\n3\n</parameter>\n</f>", "<f><parameter=a>1</parameter></f>"]),
    ("parameters in a row", row(const("-"), {**CALL, "content": {"type": "qwen_xml_parameter", "json_schema": CALL["content"]["json_schema"]}}, const("-")), f"-{A_CALL}-",
        ["-<f></f>-"], ["-<f></f>"]),
    ("nested", {"type": "star", "content": row(either(const("a"), row(const("b"), {"type": "optional", "content": LIST})), const("."))}, rf"(?:(?:a|b(?:{A_LIST})?)\.)*",
        ["", "a.b.", "b[1].a."], ["a", "[1].", "b[1][1]."]),
]  # fmt: skip


def constraint_of(form: dict[str, Any]) -> Any:
    return structural_tag({"type": "structural_tag", "format": form}, "t")


@pytest.mark.parametrize(("form", "pattern", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])  # fmt: skip
def test_a_format_takes_the_texts_of_its_pattern(
    form: dict[str, Any], pattern: str, good: list[str], bad: list[str]
) -> None:
    constraint = constraint_of(form)
    for text in good:
        assert re.fullmatch(pattern, text) and takes(constraint, FACTS, text), text
    for text in bad:
        assert not re.fullmatch(pattern, text) and not takes(constraint, FACTS, text), text
    compiled, rng = compile_constraint(constraint, FACTS, CompileOptions()), random.Random(0)

    class Held:
        matcher = load_grammar(compiled.grammar, FACTS)

    finished = [text for _ in range(12) if (text := _walk(Held, FACTS, rng)) is not None]  # type: ignore[arg-type]
    for text in finished:
        assert re.fullmatch(pattern, text), text
    assert finished or "any_text" in str(form) or "trigger" in str(form)


# ---------------------------------------------------------------- tokens


def ids(*pieces: int | str) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        found += [piece] if isinstance(piece, int) else FACTS.encode(piece)
    return found


def takes_tokens(form: dict[str, Any], *pieces: int | str) -> bool:
    grammar = compile_constraint(constraint_of(form), FACTS, CompileOptions()).grammar
    tokens = [*ids(*pieces), FACTS.eos_token_ids[-1]]
    return load_grammar(grammar, FACTS).advance(tokens) == len(tokens)


OTHER = FACTS.special_names["<|other|>"]
A, B = FACTS.encode("a")[0], FACTS.encode("b")[0]


def token(which: int | str) -> dict[str, Any]:
    return {"type": "token", "token": which}


def test_tokens_are_taken_by_id_and_by_text() -> None:
    for which in (OTHER, "<|other|>"):
        assert takes_tokens(row(token(which), const("x")), OTHER, "x")
        assert not takes_tokens(row(token(which), const("x")), A, "x")
    free = {"type": "any_tokens", "exclude_tokens": [A]}
    assert takes_tokens(free) and takes_tokens(free, B, OTHER, B)
    assert not takes_tokens(free, B, A)
    but = {"type": "exclude_token", "exclude_tokens": [A]}
    assert takes_tokens(but, B) and not takes_tokens(but, A)
    assert not takes_tokens(but) and not takes_tokens(but, B, B)


def test_a_tag_between_tokens_holds_text_or_json() -> None:
    form = tag(token("<|other|>"), DIGIT, token(OTHER))
    assert takes_tokens(form, OTHER, "5", OTHER) and not takes_tokens(form, OTHER, "x", OTHER)
    form = tag(token(OTHER), ANY, token(OTHER))
    assert takes_tokens(form, OTHER, "any <|othe", OTHER) and takes_tokens(form, OTHER, OTHER)
    assert not takes_tokens(form, OTHER, "any")


@pytest.mark.parametrize(
    ("form", "begin", "end"),
    [
        (tag(token(OTHER), {"type": "any_text", "max_tokens": 2}, token(OTHER)), OTHER, [OTHER]),
        (row(tag("<t>", {"type": "any_text", "max_tokens": 2}, "<|other|>"), const("b")), "<t>", [OTHER, B]),
        (row(const("<t>"), {"type": "any_text", "max_tokens": 2}), "<t>", []),
        (row(const("<t>"), {"type": "any_tokens", "max_tokens": 2}), "<t>", []),
    ],
)  # fmt: skip
def test_a_text_has_at_most_so_many_tokens(
    form: dict[str, Any], begin: Any, end: list[int]
) -> None:
    taken = [takes_tokens(form, begin, *([A] * count), *end) for count in range(4)]
    assert taken == [True, True, True, False]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "token_triggered_tags", "trigger_tokens": [OTHER], "tags": [tag(token(OTHER), DIGIT, "!")], "exclude_tokens": [A]},
        {"type": "token_dispatch", "rules": [[OTHER, row(DIGIT, const("!"))]], "exclude_tokens": [A]},
    ],
)  # fmt: skip
def test_a_token_triggers_a_tag(form: dict[str, Any]) -> None:
    assert takes_tokens(form) and takes_tokens(form, B, OTHER, "5!", B, OTHER, "6!")
    assert not takes_tokens(form, OTHER, B) and not takes_tokens(form, A)
    once = {**form, ("loop" if "rules" in form else "stop_after_first"): "rules" not in form}
    assert takes_tokens(once, B, OTHER, "5!", B)
    assert not takes_tokens(once, OTHER, "5!", OTHER, "5!")


# ---------------------------------------------------------------- what can't be held


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (row(regex("[a-z ]*"), {"type": "json_schema", "json_schema": True}), "must be clear that it has ended"),
        (row(regex("[a-z0-9{]*"), {"type": "json_schema", "json_schema": {"type": "object"}}), "must be clear"),
        ({"type": "plus", "content": row(LIST, regex("x*"))}, "must be clear"),
        (row(token("<nothing>"), LIST), "no token '<nothing>'"),
        (row(token(10**6), LIST), "no token 1000000"),
        (row(token(FACTS.eos_token_ids[0]), LIST), "ends the answer"),
        (row(LIST, {"type": "grammar", "grammar": 'root ::= "a"'}), "EBNF"),
        (row(const("a"), {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
        (tag("<t>", {"type": "any_text", "max_tokens": 5}, "</t>"), "a control token of the model must stand"),
        (functools.reduce(lambda form, _: {"type": "optional", "content": form}, range(40), DIGIT), "within one another"),
    ],
)  # fmt: skip
def test_what_can_not_be_held_for_sure_is_refused(form: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        compile_constraint(constraint_of(form), FACTS, CompileOptions())
    assert (caught.value.status, caught.value.code) == (400, "grammar")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ('{"type": "sequence", "elements": [', "]}"),
        ('{"type": "star", "content": ', "}"),
        ('{"type": "tag", "begin": "<", "end": ">", "content": ', "}"),
        ('{"type": "dispatch", "rules": [["<", ', "]]}"),
    ],
)
def test_a_deep_nest_of_formats_is_refused(opening: str, closing: str) -> None:
    for depth in (101, 300):
        text = f'{{"format": {opening * depth}{{"type": "const_string", "value": "a"}}{closing * depth}}}'
        with pytest.raises(RequestError, match="nested") as caught:
            structural_tag(text, "response_format")
        assert caught.value.param == "response_format"


def test_a_schema_in_a_format_may_be_deeper_than_formats() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    form = row({"type": "json_schema", "json_schema": schema}, const("!"))
    compile_constraint(constraint_of(form), FACTS, CompileOptions())


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (row(CALL["content"], const("a")), "elements[0].style"),
        (tag("<f>", {**CALL["content"], "json_schema": {"type": "array"}}, "</f>"), "content.json_schema"),
        (tag("<f>", {"type": "any_text", "max_tokens": -1}, "</f>"), "content.max_tokens"),
        (tag("<f>", {"type": "any_text", "max_tokens": 1, "excludes": ["a"]}, "</f>"), "content.max_tokens"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_its_place(form: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as caught:
        constraint_of(form)
    assert caught.value.param == f"t.format.{place}"


def test_an_id_that_no_token_can_have_is_refused() -> None:
    with pytest.raises(RequestError, match="id of no token") as caught:
        constraint_of(token(10**20))
    assert caught.value.param == "t.format.token"
