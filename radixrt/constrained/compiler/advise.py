"""Compiles a constraint for advice, and measures the masks of some random answers."""

import time

import numpy as np

from radixrt.base.errors import RequestError
from radixrt.constrained.advice import SLOW_COMPILE_MS, Advice, finding, refused, slow_steps
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import Constraint, JsonSchema
from radixrt.constrained.errors import CannotEnforce, GrammarExhausted
from radixrt.constrained.grammar import Compiled
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts

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
