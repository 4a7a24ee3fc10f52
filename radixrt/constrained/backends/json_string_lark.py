"""Rewrites a Lark grammar of a text into the grammar of this text between the quotes of a JSON
string.

A tool call is JSON, so the input of a custom tool is written as a string. A character that JSON
escapes becomes its escape. Every text has one form, so the rewritten grammar allows the forms of
the grammar's texts and no others. Control characters without a short escape can't be written, as in
all of the server's JSON.

llguidance decides where a terminal ends by the next byte. Behind a backslash that is too early: the
escape may belong to this terminal or to the next one. So all rules become one terminal. Rules that
refer to themselves can't, nor can they skip ignored text; such a grammar is taken if nothing in it
has to be escaped.
"""

import json
import re
import warnings

from radixrt.constrained.backends.lark import TOKEN
from radixrt.constrained.errors import CannotCompile

_ESCAPES = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}  # fmt: skip
_NOT_PLAIN = [*map(chr, range(32)), '"', "\\"]
_PLAIN = r'[^"\\\x00-\x1F]'
"""The class of the characters that a JSON string holds as they are."""

_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
}
"""The common terminals that may hold characters to be escaped."""
_COMMON_PLAIN = "DIGIT HEXDIGIT INT SIGNED_INT DECIMAL FLOAT SIGNED_FLOAT NUMBER SIGNED_NUMBER LCASE_LETTER UCASE_LETTER LETTER WORD CNAME"
"""Names of those that hold none."""
_IMPORT = re.compile(
    r"^([ \t]*%import[ \t]+common(?:\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|[ \t]*\((?P<many>[\w, \t]+)\))[ \t]*)$",
    re.MULTILINE,
)

_REGEX = re.compile(
    r"(?P<syntax>\((?:\?(?::|P?<[a-zA-Z_]\w*>)|(?!\?))|[)|*+?]|\{\d*,?\d*\})"
    r"|(?P<code>\\x\{[0-9a-fA-F]{1,6}\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})"
    r"|(?P<set>\\[dDwWsS]|\.|\[\^?\]?(?:\\.|[^\]\[\\])*\])"
    r"|(?P<one>\\[nrtfv]|\\[^a-zA-Z0-9]|[^\\\[(){}^$])",
    re.DOTALL,
)
_CODE = re.compile(r"\\[xu]\{?([0-9a-fA-F]+)\}?")
_LETTER_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


Tokens = list[tuple[str | None, str]]


def lark_in_json_string(grammar: str) -> str:
    """The grammar of the texts of ``grammar`` between the quotes of a JSON string. Raises
    CannotCompile if it has a construct that can't be rewritten; names it."""
    tokens: Tokens = []
    position = 0
    for statement in _IMPORT.finditer(grammar):
        tokens += _rewritten(grammar[position : statement.start()])
        tokens += _imported(statement)
        position = statement.end()
    tokens += _rewritten(grammar[position:])
    if not any(text == "%ignore" for _, text in tokens) and not _refers_to_itself(tokens):
        return _as_one_terminal(tokens)
    if any(kind == "terminal" and r"\\" in text for kind, text in tokens):
        raise CannotCompile(
            "The grammar of a custom tool can't have both text that JSON escapes (quotes, backslashes, line breaks) and %ignore, "
            "or rules that refer to themselves; write it with * and +, and name the blanks where they may be."
        )
    return "".join(text for _, text in tokens)


def _imported(statement: re.Match[str]) -> Tokens:
    """Imports of common terminals, and the definitions of those that must be rewritten."""
    tokens: Tokens = []
    for name in re.findall(r"\w+", statement["one"] or statement["many"]):
        alias = statement["alias"] or name
        if name in _COMMON:
            tokens += _rewritten(f"{alias}: {_COMMON[name]}\n")
        elif name in _COMMON_PLAIN.split():
            tokens.append(("import", f"%import common.{name} -> {alias}\n"))
        else:
            raise _cannot(f"%import common.{name}")
    return tokens


def _rewritten(rules: str) -> Tokens:
    """The tokens of rules, with each terminal rewritten."""
    tokens: Tokens = [(match.lastgroup, match[0]) for match in TOKEN.finditer(rules)]
    heard = [index for index, (kind, _) in enumerate(tokens) if kind is not None]
    skipped: set[int] = set()
    for index, *after in zip(heard, [*heard[1:], -1], [*heard[2:], -1, -1], strict=False):
        kind, text = tokens[index]
        following, last = ("" if one < 0 else tokens[one][1] for one in after)
        if index in skipped:
            text = ""
        elif text.startswith("%") and text not in ("%ignore", "%llguidance"):
            raise _cannot(text)
        elif text == "~" and not following[:1].isdigit():
            raise _cannot("the complement ~")
        elif kind == "terminal" and text[0] in "<@":
            raise _cannot(text)
        elif kind == "terminal" and text[0] == '"' and following == "..":
            skipped.update(after)
            ends = (f"\\x{{{ord(_content(one)[:1] or '_'):x}}}" for one in (text, last))
            text = _regex("[{}-{}]".format(*ends), "")
        elif kind == "terminal" and text[0] == '"':
            text = _literal(text)
        elif kind == "terminal" and text[0] == "/":
            pattern, _, flags = text[1:].rpartition("/")
            text = _regex(pattern, flags)
        tokens[index] = (kind, text)
    return tokens


def _definitions(tokens: Tokens) -> dict[str, set[str]]:
    """The rules to which each rule refers."""
    found: dict[str, set[str]] = {}
    heard = [token for token in tokens if token[0] is not None]
    references: set[str] = set()
    for index, (kind, text) in enumerate(heard):
        if kind == "name" and heard[index + 1 : index + 2] == [("mark", ":")]:
            references = found.setdefault(text.lstrip("!?"), set())
        elif kind == "name" and heard[index - 1][1] != "->":
            references.add(text)
    return found


def _refers_to_itself(tokens: Tokens) -> bool:
    """Whether some rule needs itself: none of those left has all its rules defined before it."""
    left = _definitions(tokens)
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    return bool(left)


def _as_one_terminal(tokens: Tokens) -> str:
    """The same grammar with every rule as a terminal."""
    names = {name: f"RULE__{number}" for number, name in enumerate(_definitions(tokens))}
    written = [
        names.get(text.lstrip("!?"), text) if kind == "name" else text for kind, text in tokens
    ]
    return f"start: {names.get('start', 'START')}\n" + "".join(written)


def _content(literal: str) -> str:
    try:
        return str(json.loads(literal.removesuffix("i")))
    except ValueError as error:
        raise _cannot(literal) from error


def _literal(literal: str) -> str:
    content = _content(literal)
    if not any(character in content for character in _NOT_PLAIN):
        return literal
    if literal.endswith("i"):
        return _regex(re.escape(content), "i")
    return json.dumps("".join(map(_written, content)), ensure_ascii=False)


def _written(character: str) -> str:
    """A character as it stands in a JSON string."""
    if character in _NOT_PLAIN and character not in _ESCAPES:
        raise _cannot(f"the control character {character!r}")
    return _ESCAPES.get(character, character)


def _regex(pattern: str, flags: str) -> str:
    """The terminal of a regular expression in Rust's syntax."""
    if set(flags) - {"i", "s"}:
        raise _cannot(f"/{pattern}/{flags}")
    written: list[str] = []
    position = 0
    while position < len(pattern):
        match = _REGEX.match(pattern, position)
        if match is None:
            raise _cannot(f"{pattern[position : position + 8]!r} of /{pattern[:80]}/")
        position = match.end()
        part = match[0]
        if match.lastgroup == "syntax":
            written.append(part)
        elif match.lastgroup == "set":
            written.append(_set(part, flags))
        else:
            code = _CODE.fullmatch(part)
            one = chr(int(code[1], 16)) if code else _LETTER_ESCAPES.get(part[1:], part[-1])
            inside = re.escape(_written(one)) if one in _NOT_PLAIN else f"\\x{{{ord(one):x}}}"
            written.append(f"(?{'i' if 'i' in flags and one not in _NOT_PLAIN else ''}:{inside})")
    return f"/{''.join(written)}/"


def _set(part: str, flags: str) -> str:
    """One character of a class: as it is, or as its escape."""
    if re.search("&&|--|~~", part):
        raise _cannot(part)
    readable = re.sub(r"\\x\{([0-9a-fA-F]+)\}", lambda m: rf"\U{int(m[1], 16):08x}", part)
    try:
        with warnings.catch_warnings(action="error"):
            pattern = re.compile(readable, re.ASCII | (re.DOTALL if "s" in flags else 0))
    except (re.error, Warning, OverflowError) as error:
        raise _cannot(part) from error
    escaped = [_ESCAPES[one] for one in _ESCAPES if pattern.fullmatch(one)]
    plain = _PLAIN if part == "." else f"[{part}&&{_PLAIN}]"
    if not any(map(pattern.fullmatch, _NOT_PLAIN)):
        plain = part
    plain = f"(?i:{plain})" if "i" in flags else plain
    return "(?:" + "|".join([plain, *map(re.escape, escaped)]) + ")"


def _cannot(construct: str) -> CannotCompile:
    return CannotCompile(
        f"The grammar of a custom tool can't have {construct}; write it in another way, as a rule or a plain regular expression."
    )
