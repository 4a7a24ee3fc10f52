"""Every matcher keeps the promises of the interface, whichever library is behind it.

The oracle is brute force: languages small enough to be written out whole. ``make
constraint-matrix`` tries more of them.
"""

import json
import os
import re
from collections.abc import Callable, Sequence

import hypothesis
import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends import fsm, llguidance
from radixrt.constrained.bitmask import bitmask_words
from radixrt.constrained.errors import CannotCompile, GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import MAX_FORCED, Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.constrained.vocabularies import KINDS, facts_of

Compile = Callable[[str, TokenizerFacts], Grammar]


HELLO = "Hello( world| the| to)"


def fsm_or_none(pattern: str, facts: TokenizerFacts) -> Grammar:
    """The finite-state machine; a test that gets none has nothing to look at.

    Built here and not in a child process, which is copied from one with torch in it.
    """
    source = fsm._build(pattern, llguidance.compile_regex(pattern, facts), facts)
    if not source and hypothesis.currently_in_test_context():
        hypothesis.reject()
    assert source
    return Grammar.compiled("fsm", source)


REGEX_BACKENDS: dict[str, Compile] = {
    "fsm": fsm_or_none,
    "llguidance": llguidance.compile_regex,
}

each_backend = pytest.mark.parametrize("backend", sorted(REGEX_BACKENDS))
each_kind = pytest.mark.parametrize("kind", sorted(KINDS))
EXAMPLES = 200 if "RADIXRT_EVERY_SCRIPT" in os.environ else 20
slow_start = settings(
    deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow]
)


def allowed(matcher: Matcher, facts: TokenizerFacts) -> set[int]:
    """The mask as a set of ids; what was in the row before does not matter."""
    row = np.full(bitmask_words(facts.vocab_size), -1, dtype=np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


# ---------------------------------------------------------------- finite languages


def _alternation(parts: list[tuple[str, frozenset[str]]]) -> tuple[str, frozenset[str]]:
    return "(" + "|".join(p for p, _ in parts) + ")", frozenset().union(*(w for _, w in parts))


def _concatenation(parts: list[tuple[str, frozenset[str]]]) -> tuple[str, frozenset[str]]:
    words = frozenset([""])
    for _, more in parts:
        words = frozenset(a + b for a in words for b in more)
    return "".join(p for p, _ in parts), words


def _repetition(
    part: tuple[str, frozenset[str]], least: int, most: int
) -> tuple[str, frozenset[str]]:
    words: frozenset[str] = frozenset()
    for count in range(least, most + 1):
        words |= _concatenation([part] * count)[1]
    return f"({part[0]}){{{least},{most}}}", words


LITERALS = st.sampled_from(["a", "b", "1", "Hello", " the", "é", "你", "to", '{"', "<tool_call>"])
LANGUAGES = st.recursive(
    LITERALS.map(lambda text: (text.replace("{", "\\{"), frozenset([text]))),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(_alternation)
        | st.lists(inner, min_size=1, max_size=3).map(_concatenation)
        | st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(lambda t: _repetition(*t))
    ),
    max_leaves=5,
).filter(lambda language: len(language[1]) <= 200)


def may_come(words: frozenset[str], so_far: bytes, facts: TokenizerFacts) -> set[int]:
    """The tokens after which one of the words can still be reached."""
    rests = {word.encode()[len(so_far) :] for word in words if word.encode().startswith(so_far)}
    tokens = {
        i
        for i, token in enumerate(facts.tokens)
        if token and i not in facts.special_ids and any(rest.startswith(token) for rest in rests)
    }
    return tokens | (set(facts.eos_token_ids) if b"" in rests else set())


def forced_text(words: frozenset[str], so_far: bytes) -> bytes:
    """The bytes that all words go on with."""
    rests = [word.encode()[len(so_far) :] for word in words if word.encode().startswith(so_far)]
    common = min(rests)
    while not all(rest.startswith(common) for rest in rests):
        common = common[:-1]
    return common


@each_backend
@each_kind
@slow_start
@given(language=LANGUAGES, data=st.data())
def test_masks_are_what_brute_force_says(
    backend: str, kind: str, language: tuple[str, frozenset[str]], data: st.DataObject
) -> None:
    pattern, words = language
    facts = facts_of(kind)
    grammar = REGEX_BACKENDS[backend](pattern, facts)
    matcher = load_grammar(grammar, facts)
    so_far, taken = b"", []
    while True:
        expected, mask = may_come(words, so_far, facts), allowed(matcher, facts)
        accepted = {t for t in range(facts.vocab_size) if matcher.fork().advance([t]) == 1}
        assert accepted == expected
        assert mask == expected or (mask and mask <= expected and forced_text(words, so_far))
        assert matcher.is_terminated() == (expected <= set(facts.eos_token_ids))
        token = data.draw(st.sampled_from(sorted(mask)))
        assert matcher.advance([token]) == 1
        taken.append(token)
        if token in facts.eos_token_ids:
            break
        so_far += facts.tokens[token]
    assert so_far.decode() in words
    assert matcher.is_terminated() and matcher.forced_tokens() == []
    assert allowed(matcher, facts) == set(facts.eos_token_ids)
    assert matcher.advance([taken[-1]]) == 0
    check_rollback(matcher, load_grammar(grammar, facts), taken, facts)


def check_rollback(
    matcher: Matcher, fresh: Matcher, taken: Sequence[int], facts: TokenizerFacts
) -> None:
    """After giving back k tokens, a matcher is like one that never took them."""
    for kept in range(len(taken) - 1, -1, -1):
        matcher.rollback(1)
        other = fresh.fork()
        assert other.advance(taken[:kept]) == kept
        assert allowed(matcher, facts) == allowed(other, facts)
        assert matcher.forced_tokens() == other.forced_tokens()
        assert matcher.is_terminated() == other.is_terminated()
    assert matcher.advance(taken) == len(taken)
    matcher.rollback(len(taken))
    assert allowed(matcher, facts) == allowed(fresh, facts)


@each_backend
@each_kind
@slow_start
@given(language=LANGUAGES, data=st.data())
def test_forced_tokens_are_those_of_decoding_step_by_step(
    backend: str, kind: str, language: tuple[str, frozenset[str]], data: st.DataObject
) -> None:
    pattern, _ = language
    facts = facts_of(kind)
    matcher = load_grammar(REGEX_BACKENDS[backend](pattern, facts), facts)
    while not matcher.is_terminated():
        stepper = matcher.fork()
        for token in matcher.forced_tokens():
            assert allowed(stepper, facts) == {token}
            assert token not in facts.eos_token_ids
            assert stepper.advance([token]) == 1
        token = data.draw(st.sampled_from(sorted(allowed(matcher, facts))))
        if token in facts.eos_token_ids:
            break
        assert matcher.advance([token]) == 1


DOUBLING = "\n".join([f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)] + ['r40 ::= "a"'])

ENDLESS = {
    "EBNF, 2^40 tokens": lambda facts: llguidance.compile_ebnf("root ::= r0\n" + DOUBLING, facts),
    "llguidance, 2^40 tokens": lambda facts: llguidance.compile_lark(
        "start: r0\n" + DOUBLING.replace(" ::=", ":"), facts
    ),
    "llguidance, long": lambda facts: llguidance.compile_regex("a{2000}", facts),
    "fsm, most states": lambda facts: fsm_or_none("a{250}", facts),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_forced_tokens_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request must not hold up a step, whatever its grammar, also if it is one that a busy
    machine would refuse."""
    monkeypatch.setattr(llguidance, "_FIRST_STEP_S", 60.0)
    facts = facts_of("byte_level")
    matcher = load_grammar(ENDLESS[name](facts), facts)
    forced = matcher.forced_tokens()
    assert 0 < len(forced) <= MAX_FORCED
    assert matcher.advance(forced) == len(forced)
    assert matcher.forced_tokens() or matcher.is_terminated()


@each_backend
def test_a_token_that_is_not_allowed_is_not_taken_and_nothing_changes(backend: str) -> None:
    facts = facts_of("byte_level")
    matcher = load_grammar(REGEX_BACKENDS[backend](HELLO, facts), facts)
    ids = facts.encode("Hello world")
    before = allowed(matcher, facts)
    wrong = next(t for t in range(facts.vocab_size) if facts.tokens[t] == b"!")
    for bad in (wrong, facts.vocab_size - 1, facts.vocab_size, 10**9, *facts.special_ids):
        assert matcher.advance([bad]) == 0
        assert allowed(matcher, facts) == before
    assert matcher.advance([*ids, wrong, *ids]) == len(ids)
    fresh = load_grammar(REGEX_BACKENDS[backend](HELLO, facts), facts)
    assert fresh.advance(ids) == len(ids)
    assert allowed(matcher, facts) == allowed(fresh, facts)
    with pytest.raises(ValueError, match="give back"):
        matcher.rollback(len(ids) + 1)


@each_backend
def test_a_fork_goes_its_own_way(backend: str) -> None:
    facts = facts_of("byte_level")
    matcher = load_grammar(REGEX_BACKENDS[backend](HELLO, facts), facts)
    assert matcher.advance(facts.encode("Hello")) == len(facts.encode("Hello"))
    before = allowed(matcher, facts)
    fork = matcher.fork()
    assert fork.advance([*facts.encode(" the"), facts.eos_token_ids[0]])
    assert fork.is_terminated() and not matcher.is_terminated()
    assert allowed(matcher, facts) == before
    matcher.rollback(1)
    assert fork.is_terminated()


@pytest.mark.parametrize(
    "pattern",
    [
        "positive|negative|neutral",
        "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        "(yes|no), (yes|no)",
        "[+-]?[0-9]{3}",
        "#[0-9a-f]{6}",
    ],
)
@each_kind
def test_everyday_patterns_become_machines(kind: str, pattern: str) -> None:
    facts = facts_of(kind)
    exact = llguidance.compile_regex(pattern, facts)
    assert fsm.compile_regex(pattern, exact, facts) is not None


@pytest.mark.parametrize(
    "pattern", ["1(a[0-9]+)?", "(ab)+", "\\w{300}", "(a|b)*a(a|b){12}", "a" * 5000]
)
def test_a_machine_that_would_differ_or_be_large_is_not_used(pattern: str) -> None:
    """outlines-core's index forbids ``a`` after ``1`` in the first."""
    facts = facts_of("byte_level_json")
    exact = llguidance.compile_regex(pattern, facts)
    assert fsm.compile_regex(pattern, exact, facts) is None


def test_a_machine_for_another_vocabulary_is_refused() -> None:
    facts = facts_of("byte_level")
    with pytest.raises(GrammarExhausted):
        load_grammar(fsm_or_none(HELLO, facts), facts_of("byte_level_json"))
    with pytest.raises(GrammarExhausted):
        load_grammar(Grammar.compiled("fsm", b"\0" * 100), facts)


# ---------------------------------------------------------------- EBNF


def as_ebnf(pattern: str) -> str:
    """The finite languages' patterns, which have groups, alternations, counts and literals, as a
    rule."""
    tokens = re.findall(r"[()|]|\{\d,\d\}|(?:\\.|[^()|{\\])+", pattern)
    texts = [
        token
        if token in ("(", ")", "|") or token[0] == "{"
        else json.dumps(token.replace("\\{", "{"))
        for token in tokens
    ]
    return "root ::= " + " ".join(texts)


@each_kind
@slow_start
@given(language=LANGUAGES, data=st.data())
def test_ebnf_masks_are_what_brute_force_says(
    kind: str, language: tuple[str, frozenset[str]], data: st.DataObject
) -> None:
    pattern, words = language
    facts = facts_of(kind)
    grammar = llguidance.compile_ebnf(as_ebnf(pattern), facts)
    fresh = load_grammar(grammar, facts)
    # Without threads, for the hundreds of tokens that are tried at each step.
    other = load_grammar(msgspec.structs.replace(grammar, is_ambiguous=False), facts)
    matcher, so_far, taken = fresh.fork(), b"", []
    while True:
        expected, mask = may_come(words, so_far, facts), allowed(matcher, facts)
        assert mask == expected or (mask and mask <= expected and forced_text(words, so_far))
        assert {t for t in range(facts.vocab_size) if other.fork().advance([t])} == expected
        assert matcher.is_terminated() == (expected <= set(facts.eos_token_ids))
        stepper = matcher.fork()
        for token in matcher.forced_tokens():
            assert allowed(stepper, facts) == {token}
            assert stepper.advance([token]) == 1
        taken.append(data.draw(st.sampled_from(sorted(mask))))
        wrong = data.draw(st.sampled_from(sorted({*range(facts.vocab_size)} - expected)))
        assert matcher.fork().advance([wrong]) == 0
        assert matcher.advance(taken[-1:]) == 1 and other.advance(taken[-1:]) == 1
        if taken[-1] in facts.eos_token_ids:
            break
        so_far += facts.tokens[taken[-1]]
    assert so_far.decode() in words and matcher.advance(taken[-1:]) == 0
    check_rollback(matcher, fresh, taken, facts)


# ---------------------------------------------------------------- JSON


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["é\n", 1, None]}, "maxItems": 3},
    {"type": "object", "properties": {"k": {"type": "string", "pattern": "^[a-c]{2,4}$"}},
     "required": ["k"], "additionalProperties": False},
    {"anyOf": [{"type": "number", "minimum": 2, "maximum": 7.5}, {"type": "string", "maxLength": 3}]},
]  # fmt: skip


@each_kind
@pytest.mark.parametrize("whitespace", ["flexible", "compact"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@settings(deadline=None, max_examples=EXAMPLES // 2, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_sampled_is_valid_json(
    kind: str, whitespace: WhitespaceName, schema: object, data: st.DataObject
) -> None:
    facts = facts_of(kind)
    grammar = llguidance.compile_json_schema(json.dumps(schema), facts, whitespace)
    matcher = load_grammar(grammar, facts)
    text = b""
    for _ in range(60):
        token = data.draw(st.sampled_from(sorted(allowed(matcher, facts))))
        assert matcher.advance([token]) == 1
        if token in facts.eos_token_ids:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
            break
        text += facts.tokens[token]


def accepts(matcher: Matcher, facts: TokenizerFacts, text: str) -> bool:
    ids = [*facts.encode(text), facts.eos_token_ids[0]]
    return matcher.fork().advance(ids) == len(ids)


def test_white_space_is_bounded() -> None:
    facts = facts_of("byte_level_json")
    schema = '{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}},"required":["a"]}'
    value = {"a": [1, 2]}
    flexible = load_grammar(llguidance.compile_json_schema(schema, facts, "flexible"), facts)
    compact = load_grammar(llguidance.compile_json_schema(schema, facts, "compact"), facts)
    dense = json.dumps(value, separators=(",", ":"))
    assert accepts(compact, facts, dense) and accepts(flexible, facts, dense)
    for text in [json.dumps(value), *(json.dumps(value, indent=i) for i in (0, 2, 4, "\t"))]:
        assert accepts(flexible, facts, text), text
        assert not accepts(compact, facts, text)
    for text in [
        '{  "a":[1,2]}',
        '{\n\n"a":[1,2]}',
        "{\n" + " " * 200 + '"a":[1,2]}',
        ' {"a":[1,2]}',
    ]:
        assert not accepts(flexible, facts, text), text


def test_a_declared_key_has_one_spelling() -> None:
    facts = facts_of("byte_level_json")
    schema = '{"type":"object","properties":{"a":{"type":"integer"}}}'
    matcher = load_grammar(llguidance.compile_json_schema(schema, facts, "compact"), facts)
    assert accepts(matcher, facts, '{"a":1}') and accepts(matcher, facts, '{"b":"x"}')
    assert not accepts(matcher, facts, '{"a":"x"}')
    assert not accepts(matcher, facts, '{"\\u0061":"x"}')


@pytest.mark.parametrize(
    "schema",
    [
        '{"type":"object","not":{"required":["a"]}}',
        '{"type":"integer","minimum":3,"maximum":2}',
        "[",
        '{"type":"array","uniqueItems":true}',
    ],
)
def test_what_llguidance_does_not_enforce_is_refused(schema: str) -> None:
    with pytest.raises(CannotCompile):
        llguidance.compile_json_schema(schema, facts_of("byte_level"), "flexible")


@pytest.mark.parametrize("pattern", ["(", "[^\\s\\S]", "a{5,2}", "\\1", "(?=a)b"])
def test_a_pattern_that_can_not_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(CannotCompile):
        llguidance.compile_regex(pattern, facts_of("byte_level"))


def test_a_dead_copy_does_not_take_the_others_with_it() -> None:
    facts = facts_of("byte_level")
    matcher = load_grammar(llguidance.compile_regex(HELLO, facts), facts)
    assert isinstance(matcher, llguidance.LlguidanceMatcher)
    ids = facts.encode("Hello world")
    assert matcher.advance(ids) == len(ids)
    before, forced = allowed(matcher, facts), matcher.forced_tokens()
    fork = matcher.fork()
    matcher._native.consume_token(facts.vocab_size - 1)  # kills a native matcher
    assert matcher._native.is_error()
    assert allowed(matcher, facts) == before and matcher.forced_tokens() == forced
    assert allowed(fork, facts) == before
    matcher._native.consume_token(facts.vocab_size - 1)
    assert allowed(matcher, facts) == allowed(fork, facts)
    matcher._native.consume_token(facts.vocab_size - 1)
    matcher.rollback(1)
    fork.rollback(1)
    assert allowed(matcher, facts) == allowed(fork, facts)
