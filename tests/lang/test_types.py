"""Types become constraints and values; functions become tools; likelihoods become a choice."""

import dataclasses
import enum
import functools
import json
from typing import Any, Literal, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest

import radixrt.lang as rl
from radixrt.lang.backends.openai_format import is_strict
from radixrt.lang.backends.protocol import Choices, JsonSchema, Piece, Score, ToolCallPiece
from radixrt.lang.runtime.calls import likeliest
from radixrt.lang.tools import as_tools, read_calls
from radixrt.lang.typed import of_python_type
from tests.lang.scripted_backend import ScriptedBackend


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Model(pydantic.BaseModel):
    name: str
    count: int = 3


@dataclasses.dataclass
class Data:
    name: str
    colours: list[Colour]


class Struct(msgspec.Struct):
    inner: Data
    maybe: int | None


@dataclasses.dataclass
class Holder:
    model: Model
    others: "list[Holder]"


class Typed(TypedDict):
    name: str


VALUES: list[tuple[Any, str, Any]] = [
    (int, "42", 42),
    (float, "4.5", 4.5),
    (bool, "true", True),
    (list[int], "[1, 2]", [1, 2]),
    (dict[str, bool], '{"a": false}', {"a": False}),
    (Literal["a", "b"], "b", "b"),
    (Literal[1, 2, None, True], "2", 2),
    (Literal[1, 2, None, False], "false", False),
    (Colour, "blue", Colour.BLUE),
    (list[Colour], '["red"]', [Colour.RED]),
    (Model, '{"name": "a"}', Model(name="a")),
    (list[Model], '[{"name": "a", "count": 1}]', [Model(name="a", count=1)]),
    (Data, '{"name": "a", "colours": ["red"]}', Data("a", [Colour.RED])),
    (Struct, '{"inner": {"name": "a", "colours": []}, "maybe": null}', Struct(Data("a", []), None)),
    (
        Holder,
        '{"model": {"name": "a", "count": 1}, "others": []}',
        Holder(Model(name="a", count=1), []),
    ),
    (Typed, '{"name": "a"}', {"name": "a"}),
    (str, "anything", "anything"),
]


@pytest.mark.parametrize(("wanted", "text", "value"), VALUES, ids=lambda value: str(value)[:30])
def test_a_type_s_text_is_allowed_by_its_constraint_and_read_as_the_type(
    wanted: Any, text: str, value: Any
) -> None:
    kind = of_python_type(wanted)
    assert kind.read(text) == value and type(kind.read(text)) is type(value)
    if isinstance(kind.constraint, JsonSchema):
        jsonschema.validate(msgspec.json.decode(text), kind.constraint.schema)
    elif isinstance(kind.constraint, Choices):
        assert text in kind.constraint.texts


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (int, "x"),
        (int, '"4"'),
        (Colour, "green"),
        (Model, "{}"),
        (Data, '{"name": 4}'),
        (bool, "1"),
    ],
)
def test_other_texts_are_refused(wanted: Any, text: str) -> None:
    with pytest.raises(ValueError):
        of_python_type(wanted).read(text)


@pytest.mark.parametrize("wanted", [Model, Data, Struct, Typed], ids=lambda one: one.__name__)
def test_objects_of_a_type_have_no_other_properties(wanted: Any) -> None:
    constraint = of_python_type(wanted).constraint
    assert isinstance(constraint, JsonSchema)
    (text,) = (text for one, text, _ in VALUES if one is wanted)
    instance = msgspec.json.decode(text)
    jsonschema.validate(instance, constraint.schema)
    with pytest.raises(jsonschema.ValidationError, match="extra"):
        jsonschema.validate(instance | {"extra": 1}, constraint.schema)


def test_strict_mode_is_asked_for_where_it_can_be_had() -> None:
    assert is_strict(of_python_type(Data).constraint.schema)  # type: ignore[union-attr]
    assert not is_strict(of_python_type(Model).constraint.schema)  # type: ignore[union-attr]
    assert not is_strict({"anyOf": [{"type": "object"}]})


@rl.function
def answer(s: rl.State, **settings: Any) -> Any:
    s += "a" + rl.gen("x", **settings)
    return s["x"]


def test_the_variable_has_the_type() -> None:
    backend = ScriptedBackend(lambda _: '{"name": "b", "count": 7}')
    assert answer.run(schema=Model, backend=backend).result == Model(name="b", count=7)
    schema = {"type": "object"}
    assert answer.run(schema=schema, backend=backend).result == {"name": "b", "count": 7}
    numbers = answer.run(type=int, n=2, backend=ScriptedBackend(lambda _: "4")).result
    assert numbers == [4, 41]


def test_an_answer_that_is_not_of_the_type_says_so() -> None:
    with pytest.raises(rl.AnswerError, match="'many' can't be read as int") as caught:
        answer.run(type=int, backend=ScriptedBackend(lambda _: "many"))
    assert caught.value.text == "many" and "max_tokens" not in str(caught.value)


def test_one_of_several_answers_that_is_not_of_the_type_loses_no_other() -> None:
    backend = ScriptedBackend(lambda _: "[")  # and "[1", of the second
    with pytest.raises(rl.AnswerError, match=r"'\['"):
        answer.run(type=list[int], n=2, backend=backend)
    first, second = answer.run(
        type=Literal[4, 5], n=2, backend=ScriptedBackend(lambda _: "4")
    ).result
    assert first == 4
    assert isinstance(second, rl.AnswerError) and second.text == "41" and second.source is not None


class CutOff(ScriptedBackend):
    async def generate(self, call):
        async for piece in super().generate(call):
            yield dataclasses.replace(piece, finish_reason="length")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"type": Model}, '{"name": "b'),
        ({"type": int}, "123"),
        ({"schema": {"type": "number"}}, "123"),
        ({"type": Literal["small", "large"]}, "sma"),
        ({"type": Literal[4, 42]}, "4"),
        ({"choices": ["small", "large"]}, "sma"),
        ({"regex": "[a-z]{5}"}, "sma"),
        ({"grammar": 'root ::= "small"'}, "sma"),
    ],
)
def test_an_answer_that_was_cut_off_says_what_to_raise(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(rl.AnswerError, match="raise it"):
        answer.run(**asked, backend=CutOff(lambda _: text))


@pytest.mark.parametrize(
    ("asked", "text", "value"),
    [
        ({}, "a long sto", "a long sto"),
        ({"type": list[int]}, "[1]", [1]),
        ({"choices": ["small", "large"]}, "small", "small"),
        ({"type": Literal[4, 42]}, "42", 42),
        ({"regex": "[a-z]+"}, "sma", "sma"),
    ],
)
def test_an_answer_that_was_complete_when_it_was_cut_off_is_one(
    asked: dict[str, Any], text: str, value: Any
) -> None:
    assert answer.run(**asked, backend=CutOff(lambda _: text)).result == value


def test_a_choice_that_was_cut_off_while_it_was_written_is_none() -> None:
    @rl.function
    def choose(s: rl.State) -> None:
        s += "a" + rl.gen("x", choices=["small", "large"])

    with pytest.raises(rl.AnswerError, match="raise it"):
        choose.run(backend=CutOff(lambda _: "sma"))
    assert choose.run(backend=ScriptedBackend(lambda _: "small"))["x"] == "small"


@pytest.mark.parametrize("wanted", [Literal["1", 1], Literal[True, "true"]])
def test_values_that_are_written_alike_are_refused(wanted: Any) -> None:
    with pytest.raises(rl.ProgramError, match="tell them apart"):
        of_python_type(wanted)


class OneOfTheEnum:
    """Stands in for a server that holds answers to a schema: it takes the last text of its enum."""

    async def answer(self, path: str, body: dict[str, Any]):
        schema = body["response_format"]["json_schema"]
        assert schema["strict"] and "stream" not in body
        ((name, choice),) = schema["schema"]["properties"].items()
        instance = {name: choice["enum"][-1]}
        jsonschema.validate(instance, schema["schema"])
        message = {"content": json.dumps(instance)}
        yield {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        ({"type": Literal[1, 22], "stream": True}, 22),
        ({"type": Colour}, Colour.BLUE),
        ({"choices": ["a", 'b "\n']}, 'b "\n'),
    ],
)
def test_openai_s_api_is_asked_for_choices_by_a_schema(asked: dict[str, Any], value: Any) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += rl.user("a") + rl.assistant(rl.gen("x", **asked))

    backend = rl.OpenAI(model="any")
    backend._http = OneOfTheEnum()  # type: ignore[assignment]
    state = program.run(backend=backend)
    assert state["x"] == value
    text = str(value.value if isinstance(value, Colour) else value)
    assert state.messages()[-1]["content"] == text


# ---------------------------------------------------------------- tools


def weather(city: str, days: int = 1, colour: Colour = Colour.RED) -> str:
    """What the weather will be.

    Told by a frog.
    """
    return f"{city} {days} {colour.name}"


def raw_call(arguments: str, name: str = "weather") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_function_becomes_a_tool() -> None:
    (tool,) = as_tools([weather])
    function = tool["function"]
    assert function["name"] == "weather"
    assert function["description"] == "What the weather will be.\n\nTold by a frog."
    parameters = function["parameters"]
    assert parameters["required"] == ["city"]
    jsonschema.validate({"city": "a", "days": 2, "colour": "blue"}, parameters)
    for wrong in ({}, {"city": 1}, {"city": "a", "more": 1}, {"city": "a", "colour": "green"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, parameters)


def test_calls_are_checked_and_converted() -> None:
    (call,) = read_calls([raw_call('{"city": "a", "colour": "blue"}')], [weather])
    assert call.arguments == {"city": "a", "colour": Colour.BLUE} and call.run() == "a 1 BLUE"


@pytest.mark.parametrize(
    "raw",
    [
        raw_call('{"days": 1}'),
        raw_call('{"city": 1}'),
        raw_call('{"city": "a", "more": 1}'),
        raw_call("{"),
        raw_call("[]"),
        raw_call("{}", "news"),
    ],
)
def test_a_call_that_does_not_fit_is_an_error(raw: dict[str, Any]) -> None:
    with pytest.raises(rl.AnswerError, match="weather"):
        read_calls([raw], [weather])


class Calling(ScriptedBackend):
    """Calls a tool, whatever it says."""

    async def generate(self, call):
        async for piece in super().generate(call):
            yield piece
        yield Piece(
            tool_calls=(ToolCallPiece(index=0, id="1", name="weather", arguments='{"city": "a"}'),)
        )


def test_an_answer_with_tools_is_of_its_type_where_nothing_is_called() -> None:
    def said(backend: ScriptedBackend, **asked: Any) -> rl.ToolAnswer:
        result: rl.ToolAnswer = answer.run(tools=[weather], backend=backend, **asked).result
        return result

    @rl.function
    def answer(s: rl.State, **asked: Any) -> Any:
        s += rl.user("a") + rl.assistant(rl.gen("x", **asked))
        return s["x"]

    json_backend = ScriptedBackend(lambda _: '{"name": "b"}')
    assert said(json_backend, schema=Model).value == Model(name="b")
    assert said(json_backend).value == '{"name": "b"}'
    with pytest.raises(rl.AnswerError, match="Model"):
        said(ScriptedBackend(lambda _: "b"), schema=Model)
    called = said(Calling(lambda _: ""), schema=Model)
    assert called.value is None and called.calls[0].arguments == {"city": "a"}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"on": [Model(name="a")]}, {"on": [{"name": "a", "count": 3}]}),
        (Data("a", [Colour.RED]), {"name": "a", "colours": ["red"]}),
        (None, None),
    ],
)
def test_what_a_tool_returns_is_told_as_json(result: Any, told: Any) -> None:
    (call,) = read_calls([raw_call('{"city": "a"}')], [weather])
    (text,) = rl.tool(call, result).parts
    assert json.loads(text.text) == told


def test_what_json_can_t_hold_is_no_result_of_a_tool() -> None:
    (call,) = read_calls([raw_call('{"city": "a"}')], [weather])
    with pytest.raises(rl.ProgramError, match="a value that JSON can represent"):
        rl.tool(call, object())


def test_functions_that_can_t_be_called_by_name_are_no_tools() -> None:
    def everything(*args: int) -> None: ...

    with pytest.raises(rl.ProgramError, match="args"):
        as_tools([everything])
    with pytest.raises(rl.ProgramError, match="no name"):
        as_tools([functools.partial(weather, days=2)])
    with pytest.raises(rl.ProgramError, match="Two tools"):
        as_tools([weather, weather])


# ---------------------------------------------------------------- choices by likelihood


@pytest.mark.parametrize(
    ("method", "scores", "best"),
    [
        # the sum would take the shorter one
        ("token_length_normalized", [Score((-1.0,)), Score((-0.6, -0.6))], 1),
        # the first token decides, though the rest is unlikely
        ("greedy_token_selection", [Score((-0.5, -9.0)), Score((-0.6, -0.1))], 0),
        # equal first tokens: the next one
        ("greedy_token_selection", [Score((-0.5, -2.0)), Score((-0.5, -1.0))], 1),
        # one has ended where they part: its own mean stands for what would follow
        ("greedy_token_selection", [Score((-0.5,)), Score((-0.5, -1.0))], 0),
        # likely anywhere is no reason
        (
            "unconditional_likelihood_normalized",
            [Score((-1.0,), (-1.0,)), Score((-2.0,), (-8.0,))],
            1,
        ),
        ("token_length_normalized", [Score((-1.0,)), Score((-1.0,))], 0),
    ],
)
def test_each_method_takes_its_own(method: Any, scores: list[Score], best: int) -> None:
    assert likeliest(scores, method) == best


def test_select_goes_on_with_what_it_chose() -> None:
    @rl.function
    def program(s: rl.State) -> None:
        s += "a" + rl.select("x", ["b", "long"]) + rl.gen("y")

    state = program.run(backend=ScriptedBackend())
    assert state["x"] == "long" and state.text() == "along<along>"
