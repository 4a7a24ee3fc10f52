"""The table of capabilities says what the installed libraries do."""

import re

import pytest

from bench.capabilities.hand_probes import FORMATS, PATTERNS
from bench.capabilities.make_table import TABLE, measure, table, table_text
from radixrt.constrained.json_schema.auditing.capabilities import Verdict, capabilities
from radixrt.constrained.json_schema.auditing.patterns import pattern_features
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern


def test_the_table_is_what_the_installed_libraries_do() -> None:
    text = table_text(table(measure()))
    assert text == TABLE.read_text("utf-8"), "run `python -m bench.capabilities.make_table`"


@pytest.mark.parametrize(
    ("feature", "llguidance", "xgrammar"),
    [
        ("object/properties", "exact", "exact"),
        ("any/not", "refuses", "drops"),
        ("array/uniqueItems", "refuses", "drops"),
        ("object/minProperties:many", "drops", "exact"),
        ("format/date", "drops", "drops"),
        ("integer/minimum:huge", "drops", "refuses"),
    ],
)
def test_known_faults_of_the_libraries_are_in_the_table(
    feature: str, llguidance: str, xgrammar: str
) -> None:
    assert capabilities().verdict("llguidance", feature) == llguidance
    if xgrammar == "drops":
        assert capabilities().verdict("xgrammar", feature) == xgrammar


def test_what_was_never_measured_is_not_enforced() -> None:
    assert capabilities().verdict("llguidance", "string/palindrome") is Verdict.UNKNOWN
    assert not Verdict.UNKNOWN.enforced


@pytest.mark.parametrize("name", sorted(DEFINED - {"uri-template", "regex"}))
def test_format_patterns_agree_with_the_examples_of_their_rfcs(name: str) -> None:
    pattern = format_pattern(name)
    assert pattern is not None
    valid, invalid = FORMATS[name]
    most = LENGTHS.get(name, 1 << 20)
    # The portable part of the syntax: Python's \d would be wider, so none of it may be there.
    assert not any(word.startswith("escape") for word in pattern_features(pattern))
    for text in valid:
        assert re.fullmatch(pattern[1:-1], text) and len(text) <= most, text
    for text in invalid:
        assert not re.fullmatch(pattern[1:-1], text) or len(text) > most, text


def test_every_construct_of_the_probes_is_named() -> None:
    assert all(name in pattern_features(p) for name, patterns in PATTERNS.items() for p in patterns)
