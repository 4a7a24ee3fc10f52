"""Compiles constraints of all kinds, turns refusals into errors of the request, and measures the masks of
some random answers for advice."""

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from radixrt.base.errors import RequestError
from radixrt.constrained.advice import SLOW_COMPILE_MS, Advice, finding, refused, slow_steps
from radixrt.constrained.backends import fsm, llguidance
from radixrt.constrained.backends.lark import alternatives, with_ecma_classes
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import (
    AnyJson,
    Choice,
    Constraint,
    Ebnf,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
)
from radixrt.constrained.errors import CannotCompile, CannotEnforce, GrammarExhausted
from radixrt.constrained.grammar import Compiled, Grammar
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts

if TYPE_CHECKING:
    from radixrt.constrained.backends.tag_schemas import TagSchemas
    from radixrt.constrained.json_schema.enforcement import EnforcedSchema


_WHAT: dict[type, str] = {
    JsonSchema: "The JSON schema",
    AnyJson: "JSON mode",
    Regex: "The regular expression",
    Choice: "The list of choices",
    Ebnf: "The EBNF grammar",
    Lark: "The Lark grammar",
}


def compile_constraint(
    constraint: Constraint,
    facts: TokenizerFacts,
    options: CompileOptions,
    schemas: "TagSchemas | None" = None,
) -> Compiled:
    """Compile a constraint of any kind.

    Args:
        schemas: what is known of the schemas of tags; takes those that are new.

    Raises:
        RequestError: no backend can enforce it; names the keyword and its place, or the reason.
    """
    size = len(msgspec.msgpack.encode(constraint))
    if size > options.max_source_bytes:
        raise refusal(
            constraint, f"It has {size} bytes; at most {options.max_source_bytes} are taken."
        )
    try:
        return _compile(constraint, facts, options, schemas)
    except CannotEnforce as error:
        raise RequestError(str(error), param="structured", code="grammar") from error
    except CannotCompile as error:
        raise refusal(constraint, str(error)) from error


def refusal(constraint: Constraint, reason: str) -> RequestError:
    """The error for a constraint that can't be kept."""
    is_of_tools = isinstance(constraint, StructuralTag) and any(tag.tool for tag in constraint.tags)
    what = "A tool call" if is_of_tools else _WHAT.get(type(constraint), "The structural tag")
    return RequestError(f"{what} can't be enforced: {reason}", param="structured", code="grammar")


def _compile(
    constraint: Constraint,
    facts: TokenizerFacts,
    options: CompileOptions,
    schemas: "TagSchemas | None",
) -> Compiled:
    match constraint:
        case JsonSchema():
            return compile_json_schema(constraint, facts, options)
        case AnyJson():
            schema = '{"type":"object"}' if constraint.object_only else "{}"
            return Compiled(
                grammar=llguidance.compile_json_schema(schema, facts, options.whitespace)
            )
        case Regex():
            return Compiled(grammar=_regex(with_ecma_classes(constraint.pattern), facts, options))
        case Choice():
            return Compiled(grammar=_choice(constraint.options, facts, options))
        case Ebnf():
            return Compiled(grammar=llguidance.compile_ebnf(constraint.grammar, facts))
        case Lark():
            return Compiled(grammar=llguidance.compile_lark(constraint.grammar, facts))
        case _:
            # here: the worker needs none of it
            from radixrt.constrained.backends.structural_tags import compile_structural_tag

            return compile_structural_tag(constraint, facts, options.whitespace, schemas)


def compile_json_schema(
    constraint: JsonSchema, facts: TokenizerFacts, options: CompileOptions
) -> Compiled:
    """As :func:`compile_constraint`, with the errors as they are.

    Raises:
        CannotEnforce: names the keyword and its place.
        CannotCompile: the backend refuses it.
    """
    from radixrt.constrained.json_schema.enforcement import enforce_json_schema

    def compiled(grammar: Grammar, parts: "EnforcedSchema") -> Compiled:
        is_validated = options.validates or parts.unenforced
        return Compiled(
            grammar=grammar,
            checks=parts.checks,
            checked=parts.checked,
            unenforced=parts.unenforced,
            validator=parts.validator if is_validated else None,
        )

    if constraint.any_order:
        try:
            parts = enforce_json_schema(constraint.schema, strict=constraint.strict)
            grammar = llguidance.compile_in_any_order(parts.schema, facts, options.whitespace)
            return compiled(grammar, parts)
        except (CannotCompile, CannotEnforce):
            pass  # the order of the schema is one of the orders

    def compile_text(text: str) -> tuple[Grammar | None, str | None]:
        try:
            return llguidance.compile_json_schema(text, facts, options.whitespace), None
        except CannotCompile:
            if (error := llguidance.schema_error(text)) is None:
                raise  # only with this tokenizer, or in its first step
            return None, error

    parts = enforce_json_schema(
        constraint.schema, strict=constraint.strict, compile_text=compile_text
    )
    return compiled(parts.grammar, parts)


def _regex(pattern: str, facts: TokenizerFacts, options: CompileOptions) -> Grammar:
    exact = llguidance.compile_regex(pattern, facts)
    if options.backend == "llguidance":
        return exact

    return fsm.compile_regex(pattern, exact, facts) or exact


def _choice(choices: tuple[str, ...], facts: TokenizerFacts, options: CompileOptions) -> Grammar:
    if not choices:
        raise CannotCompile("It is empty; give at least one choice.")
    return _regex(alternatives(choices), facts, options)


_CLOSING = (0.0, 0.1, 0.3, 0.5) * 4
"""The share of each walk's tokens that close a value where one can be closed."""
_WALK_TOKENS = 150
_WALKS_S = 0.2
"""CPU time of all walks."""


def advise(constraint: Constraint, facts: TokenizerFacts, options: CompileOptions) -> Advice:
    """The advice on a constraint for the tokenizer of one model."""
    try:
        compiled, compile_ms = _compiled(constraint, facts, options)
        if compile_ms > SLOW_COMPILE_MS:  # perhaps it was a library that loaded
            compiled, compile_ms = _compiled(constraint, facts, options)
    except RequestError as error:
        cause = error.__cause__
        return refused(error, cause if isinstance(cause, CannotEnforce) else None)
    mask_ms, before = _slowest_mask(compiled, facts)
    is_left = bool(compiled.checked or compiled.unenforced)
    schema = constraint.schema if isinstance(constraint, JsonSchema) else None
    return Advice(
        ok=True,
        backend=compiled.grammar.backend,
        exact=not is_left,
        checked=tuple(
            finding(each, "a value with it is validated once it is complete")
            for each in compiled.checked
        ),
        unenforced=tuple(
            finding(each, "nothing holds an answer to it") for each in compiled.unenforced
        ),
        slow=tuple(slow_steps(schema, compile_ms, mask_ms, before, is_left)),
        compile_ms=round(compile_ms, 3),
        mask_ms=round(mask_ms, 3),
    )


def _compiled(
    constraint: Constraint, facts: TokenizerFacts, options: CompileOptions
) -> tuple[Compiled, float]:
    """The compiled constraint, and its CPU time in ms."""
    begin = time.process_time()
    compiled = compile_constraint(constraint, facts, options)
    return compiled, 1000 * (time.process_time() - begin)


def _slowest_mask(compiled: Compiled, facts: TokenizerFacts) -> tuple[float, str]:
    """CPU time in ms of the slowest mask of some random answers, and the text before it."""
    load_grammar(compiled.grammar, facts)  # what is loaded with the first one takes no part
    rng, ends = np.random.default_rng(0), time.thread_time() + _WALKS_S
    row = np.zeros_like(facts.eos_mask)
    is_text = np.array([i not in facts.eos_token_ids for i in range(facts.vocab_size)])
    closes = np.array([token.endswith((b'"', b"}", b"]", b",")) for token in facts.tokens])
    slowest, before = 0.0, b""
    for share in _CLOSING:
        matcher, text = load_grammar(compiled.grammar, facts), b""
        for _ in range(_WALK_TOKENS):
            begin = time.thread_time()
            try:
                matcher.fill_mask(row)
            except GrammarExhausted:
                break
            spent_ms = 1000 * (time.thread_time() - begin)
            if spent_ms > slowest:
                slowest, before = spent_ms, text
            bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=facts.vocab_size)
            allowed = bits.astype(bool) & is_text
            if begin > ends or not allowed.any():
                break
            closing = allowed & closes
            choices = closing if closing.any() and rng.random() < share else allowed
            token = int(rng.choice(np.flatnonzero(choices)))
            if matcher.advance([token]) != 1:
                break
            text += facts.tokens[token]
    return slowest, before.decode(errors="replace")
