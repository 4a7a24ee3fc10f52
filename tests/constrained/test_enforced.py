"""llguidance enforces what is listed, and the formats' patterns are those of their RFCs."""

import functools
import re

import pytest

from radixrt.constrained.json_schema.enforced import (
    EXACT_FORMATS,
    is_enforced,
    pattern_constructs,
)
from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern
from tests.constrained.probes import measure
from tests.constrained.probes.hand_probes import FORMATS, PATTERNS

outcomes = functools.cache(measure.measure)


def test_the_installed_library_enforces_what_is_listed() -> None:
    """An upgrade of the library that enforces less fails here."""
    wrong = {
        use: outcome.accepted_invalid[:3]
        for use, outcome in outcomes().items()
        if outcome.accepted_invalid and is_enforced(use)
    }
    assert wrong == {}


def test_what_the_installed_library_enforces_is_listed() -> None:
    """An upgrade of the library that enforces more fails here, and may be used."""
    patterns = {f"format-pattern/{name}" for name in DEFINED}  # are patterns then
    missing = {
        use
        for use, outcome in outcomes().items()
        if outcome.compiled and not outcome.accepted_invalid and not is_enforced(use)
    }
    assert missing - patterns == set()
    assert len(outcomes()) > 450 and sum(map(is_enforced, outcomes())) > 250


def test_the_formats_that_are_not_written_as_patterns_lose_no_value() -> None:
    for name in EXACT_FORMATS:
        outcome = outcomes()[f"format/{name}"]
        assert outcome.compiled and not outcome.unwritable, name


@pytest.mark.parametrize(
    "use",
    ["any/not", "array/uniqueItems", "object/minProperties:many", "format/date", "integer/minimum:huge"],
)  # fmt: skip
def test_known_mistakes_of_the_library_are_not_listed(use: str) -> None:
    assert not is_enforced(use) and use in outcomes()


def test_what_was_never_measured_is_not_enforced() -> None:
    assert not is_enforced("string/palindrome") and not is_enforced("string/minLength+palindrome")
    assert not is_enforced("palindrome/") and not is_enforced("string/pattern+format")


@pytest.mark.parametrize("name", sorted(DEFINED - {"uri-template", "regex"}))
def test_format_patterns_agree_with_the_examples_of_their_rfcs(name: str) -> None:
    pattern = format_pattern(name)
    assert pattern is not None
    valid, invalid = FORMATS[name]
    most = LENGTHS.get(name, 1 << 20)
    # The portable part of the syntax: Python's \d would be wider, so none of it may be there.
    assert not any(word.startswith("escape") for word in pattern_constructs(pattern))
    for text in valid:
        assert re.fullmatch(pattern[1:-1], text) and len(text) <= most, text
    for text in invalid:
        assert not re.fullmatch(pattern[1:-1], text) or len(text) > most, text


def test_every_construct_of_the_probes_is_named() -> None:
    assert all(
        name in pattern_constructs(p) for name, patterns in PATTERNS.items() for p in patterns
    )
