"""The input of a custom tool is a JSON string, and takes exactly the texts of the grammar."""

import json

import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained import requests
from radixrt.constrained.backends.json_string_lark import lark_in_json_string
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import Lark
from radixrt.constrained.errors import CannotCompile
from radixrt.constrained.tool_calls import Tool, calls
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.constrained.test_compilation import takes
from tests.constrained.vocabularies import facts_of

APPLY_PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A grammar like that of coding agents for their patches."""

PATCH = '*** Begin Patch\n*** Add File: a "b"\\c.py\n+print("hi\\n")\t\n+\n*** Update File: x\n@@ def\n-a\n+b\n*** End Patch'

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (APPLY_PATCH, [PATCH, PATCH + "\n"], [PATCH.replace("Begin", "Began"), PATCH + "\n\n"]),
    ('start: A\nA: /[\\n"]/', ["\n", '"'], ["a", "n", "\\"]),
    ('start: "a".."z" " ".."~"', ['a"', "z\\", "b~"], ["a\n", "a"]),
    ('start: "x\\"y"i', ['X"Y', 'x"y'], ["xy"]),
    (r"start: /\s+[^a]/s", [" \n\tb", " \n"], ["  a"]),
    (r"start: /./s", ["\n", '"', "\\", "é"], ["ab", ""]),
    (r"start: /./", ['"', "\\", "a"], ["\n"]),
    (r"start: /[b\x{22}-\x{23}]{2}\x41\//", ['"#A/', "bbA/"], ['"A/', '""a/']),
    ('start: a ~ 2..3\na: "\\t" | [ "b" ] "c"', ["\t\t", "\tbcc"], ["\t", "\tb"]),
    ("start: INT (WS INT)*\n%import common (INT, WS)", ["1 2\n3", "1"], ["1,2"]),
    ("start: X\n%import common.ESCAPED_STRING -> X", ['"a\\"b"'], ['"a"b"']),
    ('start: e\ne: "(" e ")" | INT\n%import common.INT', ["((1))", "2"], ["(1"]),
    ('start: a a\n%ignore / +/\na: "x"', ["x  x", "xx"], ["x y"]),
]


@pytest.mark.parametrize("case", GRAMMARS, ids=lambda case: repr(case[0])[:40])
@pytest.mark.parametrize("kind", ["byte_level_json", "control_tool_call"])
def test_a_call_holds_exactly_the_texts_of_the_grammar(
    kind: str, case: tuple[str, list[str], list[str]]
) -> None:
    grammar, good, bad = case
    facts = facts_of(kind)
    arguments = requests.json_schema({"type": "object"}, "tools")
    tool = Tool("edit", arguments, Lark(grammar=grammar, in_json_string=True))
    constraint = calls([tool], FORMATS["hermes"], required=True, most=1)
    for text in [*good, *bad]:
        assert takes(Lark(grammar=grammar), facts, text) == (text in good), text
        body = json.dumps({"name": "edit", "arguments": {"input": text}}, ensure_ascii=False)
        written = f"<tool_call>\n{body}\n</tool_call>"
        assert takes(constraint, facts, written) == (text in good), text


@pytest.mark.parametrize("grammar", ['start: "a', "start: other", 'start: "a" start'])
def test_the_error_of_a_grammar_names_its_tool(grammar: str) -> None:
    arguments = requests.json_schema({"type": "object"}, "tools")
    tools = [
        Tool("look", arguments),
        Tool("edit", arguments, Lark(grammar=grammar, in_json_string=True)),
    ]
    constraint = calls(tools, FORMATS["hermes"], required=True, most=1)
    with pytest.raises(RequestError, match="A tool call can't be enforced: In the tool 'edit': "):
        compile_constraint(constraint, facts_of("byte_level_json"), CompileOptions())


@pytest.mark.parametrize(
    "grammar",
    [
        'start: e\ne: "(" e ")" | "\\n"',
        'start: a a\n%ignore /\\s+/\na: "x"',
        "start: ~A\nA: /a/",
        r"start: /\p{L}/",
        "start: <think>",
        "start: /a$/",
        "start: /(?i:a)/",
        "start: /[a&&b]/",
        "start: /a/x",
        'start: "\\u0001"',
        'start: %regex {"substring_words": "a b"}',
        "start: A\n%import common.C_COMMENT -> A",
        "start: @other",
    ],
)
def test_what_cannot_be_rewritten_is_refused(grammar: str) -> None:
    with pytest.raises(CannotCompile, match="custom tool"):
        lark_in_json_string(grammar)
