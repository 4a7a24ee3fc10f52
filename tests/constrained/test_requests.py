"""What users mean by their constraints, and what they are told where that is unclear."""

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
from typing_extensions import TypedDict

from radixrt.base.errors import RequestError
from radixrt.constrained import requests, tool_calls
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Choice,
    Ebnf,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Tag,
)
from radixrt.constrained.json_schema.normal import document
from radixrt.constrained.structural_tags import structural_tag

GBNF = 'root ::= "yes" | "no" again\nagain ::= root'
LARK = 'start: "yes" | "no" start // ::= is not here\n'


class Color(enum.Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    b: int
    a: Color | None = None


@dataclasses.dataclass
class Record:
    a: int


class Typed(TypedDict):
    a: str


@pytest.mark.parametrize(
    ("python_type", "valid", "invalid"),
    [
        (Model, {"b": 1, "a": "red"}, {"b": 1, "a": "blue"}),
        (Record, {"a": 1}, {"a": "1"}),
        (Typed, {"a": "1"}, {}),
        (list[int], [1, 2], [1, "2"]),
        (Color, "red", "blue"),
        (int | str, 5, 5.5),
    ],
)
def test_a_python_type_becomes_its_schema(python_type: Any, valid: Any, invalid: Any) -> None:
    schema = json.loads(requests.json_schema(python_type, "schema").schema)
    jsonschema.validate(valid, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(invalid, schema)


def test_a_schema_keeps_its_order_and_its_numbers() -> None:
    text = '{"properties": {"z": {"const": 12345678901234567890123}, "a": {"type": "string"}}}'
    for schema in (text, json.loads(text)):
        assert requests.json_schema(schema, "schema") == JsonSchema(schema=text)
    assert requests.json_schema(True, "schema").schema == "true"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (5, "not an integer"),
        ([], "not a list"),
        ("[1]", "not a list"),
        (None, "not null"),
        ("{", "not valid JSON"),
        ('{"minimum": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
        ({"const": float("inf")}, "can't be written as JSON"),
        ({"const": {1, 2}}, "can't be written as JSON"),
        ({"const": "\ud800"}, "lone surrogate"),
        ('{"const": "\\ud800"}', "lone surrogate"),
        (lambda: 1, "must be a JSON schema"),
        (Color.RED, "type that pydantic can describe"),
    ],
)
def test_what_is_no_schema_is_told_so(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        requests.json_schema(schema, "the_field")
    assert error.value.param == "the_field" and error.value.status == 400


def test_deep_schemas_are_taken_up_to_a_limit() -> None:
    def nested(depth: int) -> Any:
        schema: Any = {}
        for _ in range(depth):
            schema = {"items": schema}
        return schema

    requests.json_schema(nested(200), "schema")
    for depth in (300, 50_000):
        with pytest.raises(RequestError, match="256 deep"):
            requests.json_schema(nested(depth), "schema")


def test_grammars_are_told_apart() -> None:
    assert requests.grammar(GBNF, "g") == Ebnf(grammar=GBNF)
    assert requests.grammar(LARK, "g") == Lark(grammar=LARK)
    assert requests.grammar('start: "::="', "g") == Lark(grammar='start: "::="')


def test_choices_are_different_texts() -> None:
    assert requests.choice(["b", "a", "b"], "c") == Choice(options=("b", "a"))
    for wrong in ([], "ab", ["a", 1], None, {"a": 1}):
        with pytest.raises(RequestError):
            requests.choice(wrong, "c")


def test_keywords_of_a_python_program() -> None:
    assert requests.from_keywords({}) is None
    assert requests.from_keywords({"regex": "a"}) == Regex(pattern="a")
    assert requests.from_keywords({"schema": {}, "strict": False}) == JsonSchema(
        schema="{}", strict=False
    )
    assert requests.from_keywords({"structured": AnyJson()}) == AnyJson()
    for wrong in ({"regexp": "a"}, {"regex": "a", "schema": {}}, {"strict": True}, {"structured": "a"}):  # fmt: skip
        with pytest.raises(RequestError):
            requests.from_keywords(wrong)


# ---------------------------------------------------------------- structural tags

OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": True, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG_A = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}  # fmt: skip
TAG_B = {"begin": "<f=b>", "content": {"type": "json_schema", "json_schema": True}, "end": "</f>"}


TEXT = {"type": "any_text"}


def new(format_type: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": format_type, **fields}}


def test_both_forms_of_structural_tags_mean_the_same() -> None:
    tags = (
        Tag(begin="<f=a>", content=JsonSchema(schema='{"type": "integer"}'), end="</f>"),
        Tag(begin="<f=b>", content=JsonSchema(schema="true"), end="</f>"),
    )
    expected = StructuralTag(tags=tags, triggers=("<f=",))
    assert structural_tag(OLD, "t") == expected
    assert structural_tag(json.dumps(OLD), "t") == expected
    triggered = new("triggered_tags", tags=[TAG_A, TAG_B], triggers=["<f="])
    assert structural_tag(triggered, "t") == expected
    triggered["format"] |= {"at_least_one": True, "stop_after_first": True}
    assert structural_tag(triggered, "t") == StructuralTag(
        tags=tags, triggers=("<f=",), min_tags=1, max_tags=1
    )
    separated = structural_tag(new("tags_with_separator", tags=[TAG_A, TAG_B], separator=","), "t")
    assert separated == StructuralTag(
        tags=tags, triggers=("<f=a>", "<f=b>"), free_text=False, separator=","
    )


def test_each_kind_of_content() -> None:
    def content(**fields: Any) -> Any:
        constraint = structural_tag(new("tag", begin="<", content=fields, end=">"), "t")
        assert isinstance(constraint, StructuralTag)
        assert (constraint.min_tags, constraint.max_tags, constraint.free_text) == (1, 1, False)
        return constraint.tags[0].content

    assert content(type="regex", pattern="a+") == Regex(pattern="a+")
    assert content(type="grammar", grammar=GBNF) == Ebnf(grammar=GBNF)
    assert content(type="const_string", value="x") == Choice(options=("x",))
    assert content(type="any_text") == AnyText()
    assert structural_tag(new("regex", pattern="a+"), "t") == Regex(pattern="a+")


def test_the_error_of_a_format_names_all_that_may_stand_there() -> None:
    with pytest.raises(
        RequestError, match=r"one of json_schema, .*sequence, or, .*not .qwen"
    ) as error:
        structural_tag(new("qwen_xml_parameter", json_schema={}), "t")
    assert error.value.param == "t.format.type"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "t"),
        ("[]", "t"),
        ("{", "t"),
        ({}, "t"),
        ({"type": "json_object"}, "t.type"),
        ({**OLD, "structures": []}, "t.structures"),
        ({**OLD, "triggers": ["<g"]}, "t.tags[0].begin"),
        ({**OLD, "triggers": ["<f=", "<"]}, "t.tags[0].begin"),
        ({**OLD, "triggers": ["<f=", "<h"]}, "t.triggers[1]"),
        ({**OLD, "triggers": [""]}, "t.triggers"),
        ({**OLD, "triggers": "<f="}, "t.triggers"),
        ({**OLD, "at_least_one": True}, "t.at_least_one"),
        ({**OLD, "structures": [{"begin": "<f=", "end": ""}]}, "t.structures[0].schema"),
        ({**OLD, "structures": [{"begin": "", "schema": {}, "end": ""}]}, "t.structures[0].begin"),
        (new("any_text"), "t.format"),
        (new("sequence", elements=[]), "t.format.elements"),
        (new("tag", begin="<", content={"type": "any_text"}, end=""), "t.format.end"),
        (new("tag", begin={"token": 5}, content={"type": "any_text"}, end=">"), "t.format.end"),
        (new("tag", begin="<", content={"type": []}, end=">"), "t.format.content.type"),
        (new("tag", begin="<", content=None, end=">"), "t.format.content"),
        (
            new("triggered_tags", tags=[TAG_A], triggers=["<"], excludes=[""]),
            "t.format.excludes",
        ),
        (new("triggered_tags", tags=[TAG_A], triggers=["<"], at_least_one=1), "t.format.at_least_one"),
        (new("triggered_tags", tags=[5], triggers=["<"]), "t.format.tags[0]"),
        (new("json_schema", json_schema={}, style="qwen_xml"), "t.format.style"),
        (new("json_schema", json_schema={}, any_order=1), "t.format.any_order"),
        (new("json_schema", json_schema={}, max_whitespace_cnt=2), "t.format.max_whitespace_cnt"),
        (new("sequence", elements=[TEXT, TAG_A]), "t.format.elements[0]"),
        (new("or", elements=[TEXT, TAG_A]), "t.format.elements"),
        (new("star", content=TEXT), "t.format.content"),
        (new("repeat", content=TAG_A, min=2, max=1), "t.format.max"),
        (new("repeat", content=TAG_A, min="1", max=2), "t.format.min"),
        (new("repeat", content=TAG_A, min=0, max=10**9), "t.format.max"),
        (new("token", token=""), "t.format.token"),
        (new("any_tokens", exclude_tokens=[-1]), "t.format.exclude_tokens"),
        (new("any_text", max_chars=5), "t.format.max_chars"),
        (new("dispatch", rules=[["<", TAG_A, 1]]), "t.format.rules[0]"),
        (new("dispatch", rules=[[5, TAG_A]]), "t.format.rules[0][0]"),
        (new("dispatch", rules=[["<", TAG_A]], loop="no"), "t.format.loop"),
        (new("token_dispatch", rules=[[5, TEXT]]), "t.format.rules[0][1]"),
        (new("token_triggered_tags", trigger_tokens=[5], tags=[{"begin": {"token": 6}, "content": TAG_A, "end": ""}]), "t.format.tags[0].begin.token"),
    ],
)  # fmt: skip
def test_a_structural_tag_that_would_have_to_be_guessed_is_refused(value: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        structural_tag(value, "t")
    assert error.value.param == param and param in error.value.message


# ---------------------------------------------------------------- tools


def test_a_tool_without_parameters_takes_none() -> None:
    schema = json.loads(tool_calls.Tool.from_schema("f", None, True, "p").arguments.schema)
    jsonschema.validate({}, schema)
    for wrong in ({"a": 1}, [], None):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_arguments_are_an_object_though_the_parameters_do_not_say_so() -> None:
    schema = json.loads(
        tool_calls.Tool.from_schema("f", {"properties": {"a": {}}}, True, "p").arguments.schema
    )
    jsonschema.validate({"a": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(5, schema)
    for wrong in (True, [], {"type": "string"}, {"type": ["object", "null"]}):
        with pytest.raises(RequestError, match='of type "object"'):
            tool_calls.Tool.from_schema("f", wrong, True, "p")


def test_the_documented_depth_is_the_one_that_is_enforced() -> None:
    page = Path(__file__).parents[2] / "docs" / "structured_output.md"
    assert f"Schemas nest at most {document.MAX_DEPTH} deep" in page.read_text(encoding="utf-8")
