"""Patterns mean the same to everyone who reads them."""

import re

import pytest

from radixrt.constrained.json_schema.patterns import UnknownSyntax, parse, portable, python_pattern

# (pattern, strings that match by ECMA-262, strings that do not)
MEANINGS = [
    ("^\\d$", ["3"], ["٣", "a", "3\n"]),
    ("^\\D$", ["a", "é"], ["3"]),
    ("^\\w+$", ["aZ_9"], ["é", "a b", "-"]),
    ("^[^\\w]$", ["-", " "], ["a", "_"]),
    ("^[^\\W_]$", ["a", "9"], ["_", "-"]),
    ("^[^\\W_]+$", ["a", "a9"], ["aé", "a_", "é"]),
    ("^[^\\D7]{2}$", ["12"], ["1", "1a", "17", "1é"]),
    ("^[\\Wa]$", ["a", "-", "é"], ["b"]),
    ("^[\\Wa]+$", ["a", "a-é"], ["ab"]),
    ("^\\s$", [" ", "\u00a0", "\ufeff", "\u2028"], ["a", ""]),
    ("^\\S$", ["a", "-"], ["\u00a0", "\ufeff"]),
    ("^[\\s\\S]$", ["a", "\n", "\u180e"], [""]),
    ("^.$", ["a", "😀"], ["\n", "\r", "\u2028", ""]),
    ("^a$", ["a"], ["a\n", "\na"]),
    ("a|b$", ["ax", "xb"], ["bx"]),
    ("^[a-c\\-]$", ["a", "-"], ["d"]),
    ("^\\u00e9\\x41$", ["éA"], ["e"]),
    ("^\\ud83d\\ude00$", ["😀"], ["\ufffd"]),
    ("^(ab|c){2}$", ["abc", "cc"], ["ab", "abcab"]),
    ("^[]a]", [], ["]a", "a"]),
    ("^[^]$", ["a", "\n"], [""]),
    ("^[]*$", [""], ["a"]),
    ("^\\/\\.\\$$", ["/.$"], ["/a$"]),
    ("^\\{a}$", ["{a}"], ["a"]),
    ("^(?<year>\\d{2})$", ["12"], ["1"]),
]


@pytest.mark.parametrize(("pattern", "matching", "others"), MEANINGS)
def test_a_validator_in_python_reads_a_pattern_as_ecma_262_does(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    if pattern == "^[]a]":
        with pytest.raises(UnknownSyntax):
            parse(pattern)  # in ECMA-262 an empty class, then a stray bracket
        return
    written = python_pattern(pattern)
    assert all(re.search(written, text) for text in matching)
    assert not any(re.search(written, text) for text in others)


@pytest.mark.parametrize(
    "pattern",
    [
        "\\Z",
        "\\A",
        "(?i)a",
        "a**",
        "(",
        "[b-a]",
        "a{2,1}",
        "\\p",
        "x{,3}",
        "[[:alpha:]]+(",
        "\\u12",
    ],
)
def test_what_engines_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(UnknownSyntax):
        parse(pattern)


def test_backreferences_have_no_portable_form() -> None:
    with pytest.raises(UnknownSyntax):
        portable("(a)\\1")
    assert re.search(python_pattern("^(a|b)\\1$"), "bb")
    assert not re.search(python_pattern("^(a|b)\\1$"), "ab")
