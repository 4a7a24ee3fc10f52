"""Each tool-call format on outputs as its models' documentation shows them, cut into pieces in
every way."""

import functools
import itertools
import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.base.errors import RequestError
from radixrt.constrained import requests, tool_calls
from radixrt.constrained.constraint import Lark
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.parsers.tool_calls.parser import ToolCallParser
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.constrained.test_compilation import takes
from tests.constrained.vocabularies import byte_level_json, facts_of
from tests.parsers.test_tool_calls import join

WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["location"],
}
PLACE = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOLS: dict[str, Any] = {
    "get_weather": WEATHER,
    "now": None,
    "get_current_weather": {
        "type": "object",
        "properties": {
            "location": {"type": "string"},
            "format": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location", "format"],
    },
    "get_current_temperature": PLACE,
    "get_user_info": {
        "type": "object",
        "properties": {"user_id": {"type": "integer"}, "special": {"type": "string"}},
        "required": ["user_id"],
    },
}


class Output(NamedTuple):
    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


QWEN_CODER = [
    Output(
        "I look.\n\n<function=get_weather>\n<parameter=location>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "I look.\n\n",
        [("get_weather", {"location": "Oslo"})],
    ),
    Output(
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=location>\nSan Francisco, CA\n</parameter>\n"
        "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
        "I look.\n\n",
        [("get_weather", {"location": "San Francisco, CA", "unit": "celsius"})],
    ),
    Output(
        "<tool_call>\n<function=get_weather>\n<parameter=location>\nThis is the value for the second parameter\nthat can span\n"
        'multiple lines with "quotes", \\ and </param\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=places>\n'
        '["a", "b"]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [
            (
                "get_weather",
                {
                    "location": "This is the value for the second parameter\nthat can span\nmultiple lines with "
                    '"quotes", \\ and </param\n',
                    "days": 3,
                    "places": ["a", "b"],
                    "exact": True,
                    "note": None,
                },
            ),
            ("now", {}),
        ],
    ),
]
PARIS = ("get_current_weather", {"location": "Paris, France", "format": "celsius"})
ARGUMENTS = '{"location": "Paris, France", "format": "celsius"}'
MISTRAL = [
    Output(f"[TOOL_CALLS]get_current_weather[ARGS]{ARGUMENTS}", "", [PARIS]),
    Output(
        f"I look.[TOOL_CALLS]get_current_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
        "I look.",
        [PARIS, ("now", {})],
    ),
]
MISTRAL_V3 = [
    Output(
        f'[TOOL_CALLS] [{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}]', "", [PARIS]
    ),
    Output(
        f'I look.[TOOL_CALLS][{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "now", "arguments": {}}]',
        "I look.",
        [PARIS, ("now", {})],
    ),
]
PYTHONIC = [
    Output(
        "[get_weather(location='San Francisco', unit='celsius'), get_weather(location='Seattle')]",
        "",
        [
            ("get_weather", {"location": "San Francisco", "unit": "celsius"}),
            ("get_weather", {"location": "Seattle"}),
        ],
    ),
    Output(
        "[get_user_info(user_id=7890, special='black'), now()]",
        "",
        [("get_user_info", {"user_id": 7890, "special": "black"}), ("now", {})],
    ),
    Output(
        '[get_weather(location="Paris, \\"the city\\" [)]", days=3, places=["a)", "b"], exact=True, note=None)]',
        "",
        [
            (
                "get_weather",
                {
                    "location": 'Paris, "the city" [)]',
                    "days": 3,
                    "places": ["a)", "b"],
                    "exact": True,
                    "note": None,
                },
            )
        ],
    ),
]
FUNCTIONGEMMA = [
    Output(
        "<start_function_call>call:get_current_temperature{location:<escape>London<escape>}<end_function_call>",
        "",
        [("get_current_temperature", {"location": "London"})],
    ),
    Output(
        "I look.<start_function_call>call:get_weather{location:<escape>Tokyo, {Japan}<escape>,days:3,unit:<escape>celsius<escape>,"
        'places:["a","b"],exact:false,note:null}<end_function_call><start_function_call>call:now{}<end_function_call>',
        "I look.",
        [
            (
                "get_weather",
                {
                    "location": "Tokyo, {Japan}",
                    "days": 3,
                    "unit": "celsius",
                    "places": ["a", "b"],
                    "exact": False,
                    "note": None,
                },
            ),
            ("now", {}),
        ],
    ),
]
GEMMA4 = [
    Output(
        'I look.<|tool_call>call:get_weather{location:<|"|>San Francisco<|"|>,unit:<|"|>celsius<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "I look.",
        [("get_weather", {"location": "San Francisco", "unit": "celsius"}), ("now", {})],
    ),
    Output(
        '<|tool_call>call:get_weather{location:<|"|>"Tokyo", {Japan}<|"|>,days:3,places:["a","b"],exact:false,note:null}'
        "<tool_call|>",
        "",
        [
            (
                "get_weather",
                {
                    "location": '"Tokyo", {Japan}',
                    "days": 3,
                    "places": ["a", "b"],
                    "exact": False,
                    "note": None,
                },
            )
        ],
    ),
]
PHI4_MINI = [
    Output(
        f'<|tool_call|>[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}]<|/tool_call|>',
        "",
        [PARIS],
    ),
    Output(
        f'functools[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [PARIS, ("now", {})],
    ),
]
EVERY_KIND = {
    "location": 'a\n"b" </ c\n',
    "days": 3,
    "places": ["a", "b"],
    "exact": True,
    "note": None,
}
SEED_OSS = [
    Output(
        "I look.\n\n<seed:tool_call>\n<function=get_weather>\n<parameter=location>Oslo</parameter>\n"
        "<parameter=unit>celsius</parameter>\n</function>\n</seed:tool_call>",
        "I look.\n\n",
        [("get_weather", {"location": "Oslo", "unit": "celsius"})],
    ),
    Output(
        '<seed:tool_call>\n<function=get_weather>\n<parameter=location>a\n"b" </ c\n</parameter>\n<parameter=days>3</parameter>\n'
        '<parameter=places>["a", "b"]</parameter>\n<parameter=exact>true</parameter>\n<parameter=note>null</parameter>\n'
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "",
        [("get_weather", EVERY_KIND), ("now", {})],
    ),
]
MINIMAX_M2 = [
    Output(
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">Oslo</parameter>\n'
        '<parameter name="unit">celsius</parameter>\n</invoke>\n</minimax:tool_call>',
        "I look.\n",
        [("get_weather", {"location": "Oslo", "unit": "celsius"})],
    ),
    Output(
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">a\n"b" </ c\n</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="places">["a", "b"]</parameter>\n'
        '<parameter name="exact">true</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", EVERY_KIND), ("now", {})],
    ),
]
GLM45 = [
    Output(
        "I look.\n<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>celsius</arg_value>\n</tool_call>",
        "I look.\n",
        [("get_weather", {"location": "Oslo", "unit": "celsius"})],
    ),
    Output(
        '<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>a\n"b" </ c\n</arg_value>\n<arg_key>days</arg_key>\n'
        '<arg_value>3</arg_value>\n<arg_key>places</arg_key>\n<arg_value>["a", "b"]</arg_value>\n<arg_key>exact</arg_key>\n'
        "<arg_value>true</arg_value>\n<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [("get_weather", EVERY_KIND), ("now", {})],
    ),
]
GLM47 = [
    Output(
        "I look.<tool_call>get_weather<arg_key>location</arg_key><arg_value>Oslo</arg_value><arg_key>unit</arg_key>"
        "<arg_value>celsius</arg_value></tool_call>",
        "I look.",
        [("get_weather", {"location": "Oslo", "unit": "celsius"})],
    ),
    Output(
        '<tool_call>get_weather<arg_key>location</arg_key><arg_value>a\n"b" </ c\n</arg_value><arg_key>days</arg_key>'
        '<arg_value>3</arg_value><arg_key>places</arg_key><arg_value>["a", "b"]</arg_value><arg_key>exact</arg_key>'
        "<arg_value>true</arg_value><arg_key>note</arg_key><arg_value>null</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [("get_weather", EVERY_KIND), ("now", {})],
    ),
]
GRANITE = [
    Output(
        f'<|tool_call|>[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}]', "", [PARIS]
    ),
    Output(
        f'I look.<tool_call>[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
        "I look.",
        [PARIS, ("now", {})],
    ),
]
HUNYUAN = [
    Output(
        f"<tool_calls><tool_call>get_current_weather\n```json\n{ARGUMENTS}\n```</tool_call></tool_calls>",
        "",
        [PARIS],
    ),
    Output(
        f"I look.<tool_calls><tool_call>get_current_weather\n```json\n{ARGUMENTS}\n```</tool_call>\n<tool_call>now\n```json\n{{}}\n"
        "```</tool_call></tool_calls>",
        "I look.",
        [PARIS, ("now", {})],
    ),
]
EXAONE4 = [
    Output(
        f'I look.\n<tool_call>{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "I look.\n",
        [PARIS, ("now", {})],
    ),
]
OLMO3 = [
    Output(
        'I look.<function_calls>get_weather(location="Oslo", unit="celsius")</function_calls>',
        "I look.",
        [("get_weather", {"location": "Oslo", "unit": "celsius"})],
    ),
    Output(
        '<function_calls>get_weather(location="a\\n\\"b\\" </ c\\n", days=3, places=["a", "b"], exact=true, note=null)\nnow()'
        "</function_calls>",
        "",
        [("get_weather", EVERY_KIND), ("now", {})],
    ),
]
LFM2 = [
    Output(
        "<|tool_call_start|>[get_weather(location='San Francisco', unit='celsius'), now()]<|tool_call_end|>",
        "",
        [("get_weather", {"location": "San Francisco", "unit": "celsius"}), ("now", {})],
    ),
    Output(
        'I look.<|tool_call_start|>[get_weather(location="a\\n\\"b\\" </ c\\n", days=3, places=["a", "b"], exact=True, note=None)]'
        "<|tool_call_end|>",
        "I look.",
        [("get_weather", EVERY_KIND)],
    ),
]
NEMOTRON_JSON = [
    Output(
        f'I look.\n\n<TOOLCALL>[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
        "</TOOLCALL>",
        "I look.\n\n",
        [PARIS, ("now", {})],
    ),
]
FALCON = [
    Output(
        f'<tool_call>\n[\n{{"name": "get_current_weather", "arguments": {ARGUMENTS}}},\n{{"name": "now", "arguments": {{}}}}\n]\n'
        "</tool_call>",
        "",
        [PARIS, ("now", {})],
    ),
]
DEEPSEEK_V3 = [
    Output(
        "I look.<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>get_current_weather\n```json\n"
        f"{ARGUMENTS}\n```<\uff5ctool▁call▁end\uff5c>\n<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>now\n```json\n{{}}\n```"
        "<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>",
        "I look.",
        [PARIS, ("now", {})],
    ),
]
DEEPSEEK_V31 = [
    Output(
        f"I look.<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>get_current_weather<\uff5ctool▁sep\uff5c>{ARGUMENTS}<\uff5ctool▁call▁end\uff5c>"
        "<\uff5ctool▁call▁begin\uff5c>now<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>",
        "I look.",
        [PARIS, ("now", {})],
    ),
]
KIMI_K2 = [
    Output(
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_current_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        [PARIS],
    ),
]
OUTPUTS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "nemotron_json": NEMOTRON_JSON,
    "falcon": FALCON,
    "qwen3_coder": QWEN_CODER,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "glm45": GLM45,
    "glm47": GLM47,
    "granite": GRANITE,
    "hunyuan": HUNYUAN,
    "exaone4": EXAONE4,
    "olmo3": OLMO3,
    "mistral": MISTRAL,
    "mistral_v3": MISTRAL_V3,
    "pythonic": PYTHONIC,
    "functiongemma": FUNCTIONGEMMA,
    "gemma4": GEMMA4,
    "phi4_mini": PHI4_MINI,
}
OTHER_SPELLINGS = {
    "lfm2": [  # the second where the system prompt asks for JSON
        (
            "<|tool_call_start|>[get_weather(location='Oslo', places=['a'], exact=true)]",
            [("get_weather", {"location": "Oslo", "places": ["a"], "exact": True})],
        ),
        (
            f'<|tool_call_start|>[{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}]<|tool_call_end|>',
            [PARIS],
        ),
    ],
    "nemotron_json": [
        (
            f'<TOOLCALL> [ {{"name": "get_current_weather", "arguments": {ARGUMENTS}}} ] </TOOLCALL>',
            [PARIS],
        )
    ],
    "falcon": [
        (
            f'<tool_call>\n{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
            [PARIS],
        )
    ],
    "mistral": [
        (f"[TOOL_CALLS]get_current_weather[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}", [PARIS]),
        (f"[TOOL_CALLS]get_current_weather{ARGUMENTS}", [PARIS]),
    ],
    "phi4_mini": [
        (
            f'<|tool_call|>{{"name": "get_current_weather", "arguments": {ARGUMENTS}}}<|/tool_call|>',
            [PARIS],
        )
    ],
    "pythonic": [
        (
            r"""[f(a={'x': [1, 2.5], "y": ('it\'s', "n\n")}, b=true)]""",
            [("f", {"a": {"x": [1, 2.5], "y": ["it's", "n\n"]}, "b": True})],
        )
    ],
    "functiongemma": [
        (
            "<start_function_call>call:f{a:{x:<escape>1<escape>,y:[<escape>[<escape>,2]}}<end_function_call>",
            [("f", {"a": {"x": "1", "y": ["[", 2]}})],
        )
    ],
    "gemma4": [  # as llama.cpp's tests of this model have them
        (
            '<|tool_call>call:set_config{config:{theme:<|"|>dark<|"|>,count:3}}<tool_call|>',
            [("set_config", {"config": {"theme": "dark", "count": 3}})],
        ),
        (
            '<|tool_call>call:todo_list{todos:[<|"|>buy milk<|"|>,<|"|>walk dog<|"|>]}<tool_call|>',
            [("todo_list", {"todos": ["buy milk", "walk dog"]})],
        ),
        ("<|tool_call>call:amount{orig:1.5e10}<tool_call|>", [("amount", {"orig": 1.5e10})]),
    ],
    "qwen3_coder": [
        (
            "<tool_call><function=get_weather><parameter=location>Oslo</parameter><parameter=exact>\nTrue\n</parameter>"
            "<parameter=more>\nnot JSON\n</parameter></function></tool_call>",
            [("get_weather", {"location": "Oslo", "exact": True, "more": "not JSON"})],
        )
    ],
    "seed_oss": [
        (
            "<seed:tool_call><function=get_weather><parameter=location>['a']</parameter><parameter=places>['a', \"b\"]</parameter>"
            "<parameter=exact>False</parameter><parameter=more>[a b</parameter></function></seed:tool_call>",
            [
                (
                    "get_weather",
                    {"location": "['a']", "places": ["a", "b"], "exact": False, "more": "[a b"},
                )
            ],
        )
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>\n<minimax:tool_call><invoke name="now"></invoke>',
            [("now", {}), ("now", {})],
        )
    ],
    "glm45": [
        (
            "<tool_call>get_weather<arg_key>location</arg_key>\n\n<arg_value> a</arg_value></tool_call>\n<tool_call>now</tool_call>",
            [("get_weather", {"location": " a"}), ("now", {})],
        )
    ],
    "granite": [
        (
            f'<|tool_call|> [{{"arguments": {ARGUMENTS}, "name": "get_current_weather"}}]',
            [PARIS],
        )
    ],
    "hunyuan": [
        (
            f"<tool_calls>\n<tool_call>get_current_weather\n```json\n{ARGUMENTS}```\n</tool_call>\n</tool_calls>",
            [PARIS],
        )
    ],
    "olmo3": [
        (
            "<function_calls>\nget_weather(location='it\\'s', exact=True)\nnow()\n</function_calls>",
            [("get_weather", {"location": "it's", "exact": True}), ("now", {})],
        )
    ],
}
CASES = [
    pytest.param(form, output, id=f"{form}-{number}")
    for form, outputs in OUTPUTS.items()
    for number, output in enumerate(outputs)
]


def parsed(form: str, pieces: list[str], **settings: bool) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = parsed_calls(form, pieces, TOOLS, **settings)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def parsed_calls(
    form: str, pieces: list[str], tools: dict[str, Any], **settings: bool
) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(FORMATS[form], tools=tools, **settings)
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = join([call for _, calls in parts for call in calls])
    assert [call.index for call in calls] == list(range(len(calls)))
    return "".join(c for c, _ in parts), [(c.name, c.arguments) for c in calls]


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(("form", "output"), CASES)
def test_a_documented_output_is_read_however_it_is_cut(
    form: str, output: Output, in_pieces: bool
) -> None:
    text = output.text
    halves = [[text[:at], text[at:]] for at in range(len(text))]
    for pieces in ([*text], *halves):
        assert parsed(form, pieces, in_pieces=in_pieces) == (output.content, output.calls)


@pytest.mark.parametrize("form", OTHER_SPELLINGS)
def test_other_spellings_are_read_where_no_grammar_holds_the_answer(form: str) -> None:
    for text, calls in OTHER_SPELLINGS[form]:
        assert parsed(form, [*text]) == ("", calls)


@pytest.mark.parametrize("form", FORMATS)
def test_what_only_begins_as_a_call_does_stays_content(form: str) -> None:
    for opening, rest in itertools.product(FORMATS[form].openings, ("oops", ' f{"a', "[ARGS", "")):
        for pieces in ([opening + rest], [*opening, *rest]):
            assert parsed(form, pieces) == (opening + rest, [])


@given(data=st.data())
@pytest.mark.parametrize("form", OUTPUTS)
def test_any_text_gives_the_same_deltas_joined_in_any_partition(
    form: str, data: st.DataObject
) -> None:
    """Broken calls too: parts of the documented outputs in any order."""
    whole = "".join(output.text for output in OUTPUTS[form])
    length = len(whole)
    parts = data.draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, 60)), max_size=6))
    text = "".join(whole[at : at + size] for at, size in parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    borders = sorted({0, len(text), *cuts})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert parsed(form, pieces) == parsed(form, [text])


CONTROL_MARKS = {
    mark
    for syntax in FORMATS.values()
    for mark in syntax.marks
    if re.fullmatch(r'<.*(call|escape|arg_|").*>|\[[A-Z_]+\]', mark)
}


@functools.cache
def with_marks() -> TokenizerFacts:
    """A vocabulary in which the marks that are control tokens of some model are so."""
    tokenizer = byte_level_json()
    tokenizer.add_special_tokens(sorted(CONTROL_MARKS))
    end = tokenizer.token_to_id("<|end|>")
    return TokenizerFacts.from_tokenizer(
        tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(end,)
    )


@pytest.mark.parametrize(("form", "output"), CASES)
def test_the_constraint_takes_what_the_documentation_shows(form: str, output: Output) -> None:
    offered = [
        tool_calls.Tool.from_schema(name, schema, True, "p")  # strict
        for name, schema in TOOLS.items()
    ]
    for facts, required in itertools.product(
        (facts_of("byte_level_json"), with_marks()), (False, True)
    ):
        held = tool_calls.calls(offered, FORMATS[form], required=required, most=None)
        is_bare = form == "qwen3_coder" and "<tool_call>" not in output.text
        if is_bare and (required or facts is with_marks()):
            continue  # only free text may leave a tag out; control tokens are no text
        text = output.text.removeprefix(output.content) if required else output.text
        assert takes(held, facts, text)
        for right, wrong in (("celsius", "kelvin"), ("days:3", "days:three"), ("7890", "'7890'")):
            assert right not in text or not takes(held, facts, text.replace(right, wrong))


@pytest.mark.parametrize("form", FORMATS)
def test_calls_begin_as_the_format_says(form: str) -> None:
    syntax = FORMATS[form]
    names = ["a", 'quo"te' if syntax.names is None else "quote"]
    tools = [tool_calls.Tool.from_schema(name, None, True, "p") for name in names]
    held = tool_calls.calls(tools, syntax, required=False, most=None)
    if syntax.before:  # the content is a message too
        assert (held.free_text, held.min_tags, held.max_tags) == (False, 1, 1)
    else:
        assert held.free_text and held.min_tags == 0 and held.max_tags is None
    if not held.lists and not syntax.before:
        for tag in held.tags:
            assert sum(tag.begin.startswith(trigger) for trigger in held.triggers) == 1
    if syntax.names is not None:
        wrong = tool_calls.Tool.from_schema("{a b>", None, True, "p")
        with pytest.raises(RequestError, match="function name"):
            tool_calls.calls([wrong], syntax, required=True, most=1)
    forced = tool_calls.calls(tools, syntax, required=True, most=1)
    assert (forced.free_text, forced.min_tags, forced.max_tags) == (False, 1, 1)


def test_marks_of_closing_alone_do_not_reach_the_content() -> None:
    for form, text, content in (
        ("hermes", "So.</think> Yes</tool_call>.", "So. Yes."),
        ("qwen3_coder", "</function>\n</tool_call>Done</tool", "\nDone</tool"),
    ):
        parser = ToolCallParser(FORMATS[form], stray_marks=("</think>",))
        parts = [*map(parser.push, text), parser.flush()]
        assert "".join(part for part, _ in parts) == content


def test_a_call_keeps_what_looks_like_a_closing_mark_in_its_arguments() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "</think></tool_call>"}}\n</tool_call>'
    parser = ToolCallParser(FORMATS["hermes"], stray_marks=("</think>",))
    _, (call,) = parser.push(text)
    assert json.loads(call.arguments) == {"a": "</think></tool_call>"}


CUSTOM = {
    "deepseek_v3": '<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>edit\n```json\n{"input": "{}"}\n```<\uff5ctool▁call▁end\uff5c>'
    "<\uff5ctool▁calls▁end\uff5c>",
    "deepseek_v31": '<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>edit<\uff5ctool▁sep\uff5c>{"input": "{}"}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
    '{"input": "{}"}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm2": '<|tool_call_start|>[edit(input="{}")]<|tool_call_end|>',
    "nemotron_json": '<TOOLCALL>[{"name": "edit", "arguments": {"input": "{}"}}]</TOOLCALL>',
    "falcon": '<tool_call>\n[\n{"name": "edit", "arguments": {"input": "{}"}}\n]\n</tool_call>',
    "hermes": '<tool_call>\n{"name": "edit", "arguments": {"input": "{}"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=edit>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]edit[ARGS]{"input": "{}"}',
    "mistral_v3": '[TOOL_CALLS] [{"name": "edit", "arguments": {"input": "{}"}}]',
    "pythonic": '[edit(input="{}")]',
    "functiongemma": "<start_function_call>call:edit{input:<escape>{}<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:edit{input:<|"|>{}<|"|>}<tool_call|>',
    "phi4_mini": 'functools[{"name": "edit", "arguments": {"input": "{}"}}]',
    "seed_oss": "<seed:tool_call>\n<function=edit>\n<parameter=input>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="input">{}</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>edit\n<arg_key>input</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>edit<arg_key>input</arg_key><arg_value>{}</arg_value></tool_call>",
    "granite": '<|tool_call|>[{"name": "edit", "arguments": {"input": "{}"}}]',
    "hunyuan": '<tool_calls><tool_call>edit\n```json\n{"input": "{}"}\n```</tool_call></tool_calls>',
    "exaone4": '<tool_call>{"name": "edit", "arguments": {"input": "{}"}}</tool_call>',
    "olmo3": '<function_calls>edit(input="{}")</function_calls>',
}


@pytest.mark.parametrize("form", CUSTOM)
def test_the_input_of_a_custom_tool_is_held_to_its_grammar_in_each_format(form: str) -> None:
    arguments = requests.json_schema({"type": "object"}, "tools")
    grammar = Lark(grammar='start: "+ " /[a-z]+/', in_json_string=True)
    tool = tool_calls.Tool("edit", arguments, grammar)
    held = tool_calls.calls([tool], FORMATS[form], required=True, most=1)
    for text, fits in (("+ abc", True), ("- abc", False), ("+ ABC", False)):
        written = CUSTOM[form].replace("{}", text)
        assert takes(held, facts_of("byte_level_json"), written) == fits
    _, calls = parsed(form, [*CUSTOM[form].replace("{}", "+ abc")], in_pieces=True)
    assert calls == [("edit", {"input": "+ abc"})]


@pytest.mark.parametrize(
    ("form", "before", "after", "stop"),
    [
        ("qwen3_coder", QWEN_CODER[1].text.partition("San")[0], "\n</parameter>\n</function>\n</tool_call>", "</parameter>"),
        ("functiongemma", "<start_function_call>call:get_weather{location:<escape>", "<escape>}<end_function_call>", "<escape>"),
        ("pythonic", "[get_weather(location='", "')]", "'"),
        ("seed_oss", SEED_OSS[0].text.partition("Oslo")[0], "</parameter>\n</function>\n</seed:tool_call>", "</parameter>"),
        ("minimax_m2", MINIMAX_M2[0].text.partition("Oslo")[0], "</parameter>\n</invoke>\n</minimax:tool_call>", "</parameter>"),
        ("glm45", GLM45[0].text.partition("Oslo")[0], "</arg_value>\n</tool_call>", "</arg_value>"),
        ("glm47", GLM47[0].text.partition("Oslo")[0], "</arg_value></tool_call>", "</arg_value>"),
        ("gemma4", '<|tool_call>call:get_weather{location:<|"|>', '<|"|>}<tool_call|>', '<|"|>'),
    ],
)  # fmt: skip
def test_a_string_can_not_hold_what_ends_it(form: str, before: str, after: str, stop: str) -> None:
    tool = tool_calls.Tool.from_schema("get_weather", WEATHER, True, "p")
    held = tool_calls.calls([tool], FORMATS[form], required=False, most=1)
    facts = facts_of("byte_level_json")
    assert takes(held, facts, f"{before}a b{after}")
    assert not takes(held, facts, f"{before}a {stop} b{after}")
