"""Whole answers with checks, decoded by models that are made of noise, under llguidance's superset
of the schema.

The worker's part (mask, exclusions, choice of a token) is done here in the plainest way.
"""

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from typing import Any, Literal

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from radixrt.constrained.grammar import SpanCheck, SpanError
from radixrt.constrained.json_schema.validation import validate_text
from radixrt.tokenizer.retry.backtracking import BacktrackPoint, FailedSpan, choose_backtrack_point
from radixrt.tokenizer.retry.checked_answer import (
    CheckedAnswer,
    DueCheck,
    RetriesExhausted,
    Rewind,
)
from radixrt.tokenizer.retry.exclusions import TokenTexts
from tests.checkpoints import tiny_tokenizers

Mood = Literal["stubborn", "greedy", "sampled", "sampled anew"]
"""stubborn: the same ranking of tokens everywhere. greedy: a ranking for each token before.
sampled: with noise that is the same when a position comes again. sampled anew: with new noise after
each rewind."""

JSON_TEXT = [
    '{"name": "red", "tags": ["red", "green", "blue"], "id": 12, "kind": "a"}, {"a": 1, "b": 2, "c": 3}',
    '[{"a":1,"b":22},{"a":10,"b":"x"}],["red","green"],["blue","green"],[1,2,3],[10,20,30],"apple","banana"',
    '{"kind":"a","x":1},{"kind":"b","y":2},{"id":100,"name":"apple"},{"tags":[]},true,false,null,[[1,2],[3]]',
]


def validate_span(schema: Any, text: str) -> list[SpanError]:
    """The errors of a value."""
    return validate_text(json.dumps(schema, ensure_ascii=False), text)


@functools.cache
def json_tokenizer() -> Tokenizer:
    """Byte-level, with the merges that real vocabularies have: ``":``, ``"},``, ``["``, ``],``,
    whole words."""
    texts = [*JSON_TEXT, *tiny_tokenizers.TEXT]
    special = ["<|im_start|>", "<|im_end|>"]
    return tiny_tokenizers.train_byte_level(
        texts, 420, special, use_regex=False, max_token_length=5
    )


class Vocabulary:
    """What decoding needs of a byte-level tokenizer whose token 1 ends an answer."""

    end_token = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.get_vocab_size()
        self.for_grammars = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=self.size, eos_token=self.end_token
        )
        self.bytes = [self.for_grammars.decode_bytes([token]) for token in range(self.size)]
        self.texts = TokenTexts(
            (token, text.decode(errors="replace"))
            for token, text in enumerate(self.bytes)
            if token > self.end_token
        )


@functools.cache
def vocabulary(kind: str = "json") -> Vocabulary:
    return Vocabulary(json_tokenizer() if kind == "json" else tiny_tokenizers.byte_level())


class NoiseModel:
    """Scores of the next token: pure functions of the answer so far, the seed and the mood.

    It likes long tokens and, as the answer grows, tokens that close something; else it would never
    end.
    """

    def __init__(self, words: Vocabulary, mood: Mood, seed: int) -> None:
        self.mood, self.seed = mood, seed
        self._lengths = np.array([len(text) for text in words.bytes])
        self._closes = np.array(
            [any(c in text for c in b'"]}') or token == 1 for token, text in enumerate(words.bytes)]
        )
        self._size = words.size

    def scores(self, tokens: list[int], retries: int) -> NDArray[np.float64]:
        """[vocab_size]"""
        before = tokens[-1] if tokens and self.mood != "stubborn" else 0
        scores = 2.5 * np.random.default_rng([self.seed, before]).normal(size=self._size)
        scores += 0.5 * np.minimum(self._lengths, 4)
        scores += self._closes * min(len(tokens) / 6, 8)
        if self.mood.startswith("sampled"):
            draw = retries if self.mood == "sampled anew" else 0
            scores += np.random.default_rng([self.seed, len(tokens), draw]).gumbel(size=self._size)
        return scores


@dataclasses.dataclass(frozen=True)
class Case:
    """A schema, what a grammar holds of it, and what is left to checks."""

    name: str
    grammar: dict[str, Any]
    checks: tuple[SpanCheck, ...]
    schema: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    text: str | None
    """None: no valid answer was found."""
    retries: int
    num_decoded: int
    """Tokens, those that were taken back included."""
    cut_off: bool = False


@functools.cache
def _compiled(grammar: str, vocabulary_kind: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary(vocabulary_kind).for_grammars, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def decode(
    case: Case,
    mood: Mood,
    seed: int,
    *,
    choose_point: Callable[[FailedSpan], BacktrackPoint | None] = choose_backtrack_point,
    any_spelling: bool = True,
    max_failures: int = 16,
    max_retries: int = 64,
    max_tokens: int = 200,
    vocabulary_kind: str = "json",
    result_delay: Callable[[], int] = lambda: 0,
    watch: Callable[[CheckedAnswer], None] = lambda answer: None,
    whitespace: bool = False,
) -> Outcome:
    """One answer, from the first token to the last result of a check.

    Args:
        result_delay: in tokens, for each result.
        watch: called after everything that happens to the answer.
    """
    words = vocabulary(vocabulary_kind)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        case.grammar, overrides={"whitespace_flexible": whitespace}
    )
    fresh = _compiled(grammar, vocabulary_kind)
    model = NoiseModel(words, mood, seed)
    answer = CheckedAnswer(
        case.checks,
        max_failures=max_failures,
        max_retries=max_retries,
        tokens_along=words.texts.along if any_spelling else None,
        choose_point=choose_point,
    )
    tokens: list[int] = []
    matcher, excluded, point, decoded = fresh.deep_copy(), [], 0, 0
    waiting: list[tuple[int, DueCheck]] = []
    while not answer.is_settled:
        if not (tokens and tokens[-1] == words.end_token) and len(tokens) < max_tokens:
            mask = _mask(matcher, words.size)
            _exclude(mask, excluded, tokens[point:])
            token = int(np.where(mask, model.scores(tokens, answer.retries), -np.inf).argmax())
            assert matcher.consume_token(token)
            tokens.append(token)
            decoded += 1
            before = _text(words, tokens[:-1])
            answer.push([token], [_text(words, tokens)[len(before) :]])
            if token == words.end_token:
                answer.finish()
            elif len(tokens) == max_tokens:
                answer.finish(cut_off=True)
        watch(answer)
        waiting += [(result_delay(), due) for due in answer.due()]
        ready = [due for delay, due in waiting if delay <= 0]
        waiting = [(delay - 1, due) for delay, due in waiting if delay > 0]
        try:
            rewind = _tell_results(answer, ready)
        except RetriesExhausted:
            return Outcome(None, answer.retries, decoded)
        if rewind is not None:
            assert rewind.num_output_kept < len(tokens)
            assert rewind.excluded and [] not in rewind.excluded
            del tokens[rewind.num_output_kept :]
            matcher, excluded, point = fresh.deep_copy(), rewind.excluded, len(tokens)
            assert matcher.consume_tokens(tokens) or not tokens
        watch(answer)
    cut_off = tokens[-1] != words.end_token
    return Outcome(_text(words, tokens), answer.retries, decoded, cut_off)


def _tell_results(answer: CheckedAnswer, ready: list[DueCheck]) -> Rewind | None:
    """The last rewind that came of them is the one that counts."""
    last = None
    for due in ready:
        errors = validate_span(due.check.schema, due.text)
        if errors:
            last = answer.failed(due.id, errors) or last
        else:
            answer.passed(due.id)
    return last


def _text(words: Vocabulary, tokens: list[int]) -> str:
    """Whole characters only, as a detokenizer gives them out."""
    data = b"".join(words.bytes[token] for token in tokens if token > words.end_token)
    for end in range(len(data), max(len(data) - 4, -1), -1):
        try:
            return data[:end].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError(data)


def _mask(matcher: llguidance.LLMatcher, size: int) -> NDArray[np.bool_]:
    """[vocab_size] tokens that the grammar allows."""
    bitmask = llguidance.numpy.allocate_token_bitmask(1, size)
    llguidance.numpy.fill_next_token_bitmask(matcher, bitmask, 0)
    return np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:size].astype(bool)


def _exclude(mask: NDArray[np.bool_], excluded: list[list[int]], since: list[int]) -> None:
    """What the worker does with Constraint.excluded."""
    last = [path[-1] for path in excluded if path[:-1] == since]
    before = mask.copy()
    mask[last] = False
    if not mask.any():
        mask[:] = before


# ---------------------------------------------------------------- policies to compare with


def point_at_the_end(failed: FailedSpan) -> BacktrackPoint:
    return BacktrackPoint([len(failed.token_ids) - 1], len(failed.text))


def point_at_the_beginning(failed: FailedSpan) -> BacktrackPoint:
    return BacktrackPoint([0], len(failed.text))


def point_ever_earlier(failed: FailedSpan) -> BacktrackPoint:
    """At the end, then at half of the value, a quarter, …"""
    return BacktrackPoint(
        [(len(failed.token_ids) - 1) >> (failed.num_failures - 1)], len(failed.text)
    )


# ---------------------------------------------------------------- schemas


def case(
    name: str, grammar: dict[str, Any], extra: dict[str, Any], at: tuple[str | None, ...] = ()
) -> Case:
    """``extra``: keywords that the value at the path ``at`` has besides those of the grammar."""
    part, schema = grammar, grammar
    wrap: list[tuple[str | None, dict[str, Any]]] = []
    for step in at:
        wrap.append((step, part))
        part = part["items"] if step is None else part["properties"][step]
    checked = {**part, **extra}
    schema = checked
    for step, around in reversed(wrap):
        schema = (
            {**around, "items": schema}
            if step is None
            else {**around, "properties": {**around["properties"], step: schema}}
        )
    check = SpanCheck(
        path=at, schema=checked, pointer="/" + "/".join(map(str, at)), keywords=tuple(extra)
    )
    return Case(name, grammar, (check,), schema)


def array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


TEXT = {"type": "string", "maxLength": 8}
COLOURS = {"enum": ["red", "rose", "green", "grey", "blue", "black"]}
KINDS = {"enum": ["a", "b", "ab"]}
DIGIT, NUMBER = integer(0, 9), integer(0, 999)
ABC = record(a=DIGIT, b=DIGIT, c=DIGIT, d=DIGIT)

CASES = [
    case("uniqueItems: digits", array(DIGIT, 3, 6), {"uniqueItems": True}),
    case("uniqueItems: eight of ten digits", array(DIGIT, 8, 8), {"uniqueItems": True}),
    case("uniqueItems: integers", array(integer(10, 99), 4, 8), {"uniqueItems": True}),
    case("uniqueItems: enum", array(COLOURS, 4, 6), {"uniqueItems": True}),
    case("uniqueItems: strings", array(TEXT, 3, 5), {"uniqueItems": True}),
    case(
        "uniqueItems: objects",
        array(record("id name", id=DIGIT, name=COLOURS), 3, 4),
        {"uniqueItems": True},
    ),
    case("uniqueItems: lists of lists", array(array(DIGIT, 1, 2), 3, 4), {"uniqueItems": True}),
    case("not: constants", COLOURS, {"not": {"enum": ["red", "rose", "blue", "black", "green"]}}),
    case("not: multiples of 2", NUMBER, {"not": {"multipleOf": 2}}),
    case("not: a letter", TEXT, {"not": {"pattern": "[eaiou]"}}),
    case("not: longer than 2", TEXT, {"not": {"minLength": 3}}),
    case("not: property together", ABC, {"not": {"required": ["a", "b"]}}),
    case(
        "not: a kind",
        record("kind x", kind=KINDS, x=DIGIT),
        {"not": {"properties": {"kind": {"pattern": "a"}}}},
    ),
    case("oneOf: multiples of 2, of 3", NUMBER, {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}),
    case("oneOf: a or b", ABC, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
    case(
        "oneOf: by prefix",
        TEXT,
        {"oneOf": [{"pattern": "^[a-zA-Z]"}, {"pattern": "[a-z]$"}]},
    ),
    case("contains: 5", array(DIGIT, 1, 6), {"contains": {"const": 5}}),
    case("contains: at least 900", array(NUMBER, 1, 5), {"contains": {"minimum": 900}}),
    case(
        "contains: two long ones",
        array(COLOURS, 1, 5),
        {"contains": {"minLength": 5}, "minContains": 2},
    ),
    case(
        "contains: at most one", array(DIGIT, 3, 5), {"contains": {"minimum": 4}, "maxContains": 1}
    ),
    case("dependentRequired: later", ABC, {"dependentRequired": {"a": ["d"], "b": ["d"]}}),
    case("dependentRequired: earlier", ABC, {"dependentRequired": {"c": ["a"], "d": ["b"]}}),
    case(
        "if/then/else: required",
        record("kind", kind=KINDS, x=DIGIT, y=DIGIT),
        {
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"], "properties": {"x": False}},
        },
    ),
    case(
        "if/then/else: bounds",
        record("kind x", kind=KINDS, x=NUMBER),
        {
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"properties": {"x": {"minimum": 500}}},
            "else": {"properties": {"x": {"maximum": 50}}},
        },
    ),
    case(
        "if/then/else: what came before",
        record("x kind", x=NUMBER, kind=KINDS),
        {
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"properties": {"x": {"minimum": 700}}},
            "else": {"properties": {"x": {"maximum": 30}}},
        },
    ),
    case(
        "oneOf in each element",
        array(record("n", n=NUMBER, s=TEXT), 2, 4),
        {"oneOf": [{"properties": {"n": {"multipleOf": 2}}}, {"required": ["s"]}]},
        at=(None,),
    ),
    case(
        "uniqueItems in a property",
        record("name tags id", name=TEXT, tags=array(COLOURS, 3, 4), id=DIGIT),
        {"uniqueItems": True},
        at=("tags",),
    ),
]


def nested_case() -> Case:
    """Checks inside of checks."""
    item = record("n", n=DIGIT, s=COLOURS)
    inner = case("", item, {"not": {"properties": {"n": {"multipleOf": 2}}}})
    outer_schema = {**array(inner.schema, 3, 4), "uniqueItems": True}
    checks = (
        SpanCheck(path=(None,), schema=inner.schema, pointer="/items", keywords=("not",)),
        SpanCheck(path=(), schema=outer_schema, pointer="", keywords=("uniqueItems",)),
    )
    return Case("checks in checks", array(item, 3, 4), checks, outer_schema)


CASES.append(nested_case())


def seeds(count: int) -> list[int]:
    return random.Random(0).sample(range(10**6), count)
