"""Which backend holds an answer to a constraint? One function for every kind, and its refusals as errors of the request."""

import json

import msgspec

from radixrt.base.config import GrammarBackendName, WhitespaceName
from radixrt.base.errors import RequestError
from radixrt.constrained.backends import llguidance
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import Compiled, Grammar
from radixrt.constrained.regex_text import alternatives
from radixrt.constrained.spec import (
    AnyJson,
    Choice,
    Ebnf,
    JsonSchema,
    Lark,
    Regex,
    Spec,
    StructuralTag,
)
from radixrt.constrained.tokenizer_facts import TokenizerFacts


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the server decides, for all requests."""

    backend: GrammarBackendName = "auto"
    """A backend by name takes what it enforces exactly; what it does not goes to the one that does."""
    whitespace: WhitespaceName = "flexible"
    """``flexible``: at each gap of a JSON text a space, or a newline and indentation. ``compact``: nothing."""
    max_source_bytes: int = 16 << 20
    """Longest schema, pattern, grammar or set of options, in UTF-8."""


_WHAT: dict[type, str] = {
    JsonSchema: "The JSON schema",
    AnyJson: "JSON mode",
    Regex: "The regular expression",
    Choice: "The list of choices",
    Ebnf: "The EBNF grammar",
    Lark: "The Lark grammar",
    StructuralTag: "The structural tag",
}


def compile_spec(spec: Spec, facts: TokenizerFacts, options: CompileOptions) -> Compiled:
    """Compile whatever a request can ask for.

    Raises:
        RequestError: no backend can hold an answer to it; names the keyword and where it stands, or the reason.
    """
    size = len(msgspec.msgpack.encode(spec))
    if size > options.max_source_bytes:
        raise refusal(spec, f"It has {size} bytes; at most {options.max_source_bytes} are taken.")
    try:
        return _compile(spec, facts, options)
    except CannotEnforce as error:
        raise RequestError(str(error), param="structured", code="grammar") from error
    except CannotCompile as error:
        raise refusal(spec, str(error)) from error


def refusal(spec: Spec, reason: str) -> RequestError:
    """The error for a constraint that can't be kept."""
    return RequestError(
        f"{_WHAT[type(spec)]} can't be enforced: {reason}", param="structured", code="grammar"
    )


def _compile(spec: Spec, facts: TokenizerFacts, options: CompileOptions) -> Compiled:
    match spec:
        case JsonSchema():
            return _json_schema(spec, facts, options)
        case AnyJson():
            grammar = llguidance.compile_any_json(spec.object_only, facts, options.whitespace)
            return Compiled(grammar=grammar)
        case Regex():
            return Compiled(grammar=_regex(spec.pattern, facts, options))
        case Choice():
            return Compiled(grammar=_choice(spec.options, facts, options))
        case Ebnf():
            from radixrt.constrained.backends import xgrammar  # here, since it takes seconds

            return Compiled(grammar=xgrammar.compile_ebnf(spec.grammar, facts))
        case Lark():
            return Compiled(grammar=llguidance.compile_lark(spec.grammar, facts))
        case StructuralTag():
            return _structural_tag(spec, facts, options)


def _json_schema(spec: JsonSchema, facts: TokenizerFacts, options: CompileOptions) -> Compiled:
    from radixrt.constrained.json_schema.auditing.audit import plan_json_schema

    wanted = "auto" if options.backend == "fsm" else options.backend
    plan = plan_json_schema(spec.schema, strict=spec.strict, backend=wanted)
    schema = json.dumps(plan.schema, ensure_ascii=False)
    if plan.backend == "xgrammar":
        from radixrt.constrained.backends import xgrammar  # here, since it takes seconds

        grammar = xgrammar.compile_json_schema(schema, facts, options.whitespace)
    else:
        grammar = llguidance.compile_json_schema(schema, facts, options.whitespace)
    return Compiled(
        grammar=grammar,
        checks=plan.checks,
        unenforced=plan.unenforced,
        validator=plan.validator,
    )


def _regex(pattern: str, facts: TokenizerFacts, options: CompileOptions) -> Grammar:
    exact = llguidance.compile_regex(pattern, facts)
    if options.backend not in ("auto", "fsm"):
        return exact
    from radixrt.constrained.backends import fsm_compiler  # here: the worker needs none of it

    return fsm_compiler.compile_regex(pattern, exact, facts) or exact


def _choice(choices: tuple[str, ...], facts: TokenizerFacts, options: CompileOptions) -> Grammar:
    if not choices:
        raise CannotCompile("It is empty; give at least one choice.")
    return _regex(alternatives(choices), facts, options)


def _structural_tag(
    spec: StructuralTag, facts: TokenizerFacts, options: CompileOptions
) -> Compiled:
    from radixrt.constrained.backends.structural_tags import compile_structural_tag

    grammar, unenforced = compile_structural_tag(spec, facts, options.whitespace)
    return Compiled(grammar=grammar, unenforced=unenforced)
