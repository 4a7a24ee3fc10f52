"""The measured engines of structured output: the router, and llguidance alone. Each compiles a
schema to matchers."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.constrained.backends import llguidance
from radixrt.constrained.compiler.compilation import compile_json_schema
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import JsonSchema
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import SpanCheck
from radixrt.constrained.json_schema.enforcement import enforce_json_schema
from radixrt.constrained.json_schema.validation import SchemaValidator
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts


class Refused(Exception):
    """A schema is not taken; says why, and by which keyword if that is known."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(reason)
        self.keyword = keyword


@dataclass
class Held:
    """A schema that an engine has taken."""

    backend: str
    matcher: Matcher
    """Before the first token."""
    checks: tuple[SpanCheck, ...] = ()
    _validators: list[SchemaValidator] = field(default_factory=list)

    def checks_pass(self, text: str) -> bool:
        """Whether every value that has a check passes it."""
        if not self._validators:
            self._validators = [SchemaValidator(check.schema) for check in self.checks]
        value = json.loads(text)
        return all(
            validator.first_error(json.dumps(part, ensure_ascii=False)) is None
            for check, validator in zip(self.checks, self._validators, strict=True)
            for part in values_at(value, check.path)
        )


def values_at(value: Any, path: tuple[str | None, ...]) -> list[Any]:
    """The parts of a value that a check's path names."""
    found = [value]
    for step in path:
        below: list[Any] = []
        for each in found:
            if isinstance(each, dict) and step is not None:
                below += [each[step]] if step in each else []
            elif step is None and isinstance(each, dict | list):
                below += each.values() if isinstance(each, dict) else each
        found = below
    return found


Engine = Callable[[str, TokenizerFacts], Held]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises:
    Refused: the schema cannot be enforced or compiled.
    """
    try:
        yield
    except CannotEnforce as error:
        raise Refused(f"{error.pointer}: {error.reason}", error.keyword) from error
    except CannotCompile as error:
        raise Refused(str(error)) from error


@_refusing()
def router(schema: str, facts: TokenizerFacts) -> Held:
    """Compile as the server does; refused is what it would answer with a 400."""
    compiled = compile_json_schema(JsonSchema(schema=schema), facts, CompileOptions())
    grammar = compiled.grammar
    assert isinstance(compiled.checks, tuple)  # of a JSON schema, not of tags
    return Held(grammar.backend, load_grammar(grammar, facts), compiled.checks)


@_refusing()
def any_order(schema: str, facts: TokenizerFacts) -> Held:
    """Compile as the server does for a schema with ``"x-property-order": "any"``."""
    enforced = enforce_json_schema(schema)
    grammar = llguidance.compile_in_any_order(enforced.schema, facts, "flexible")
    return Held(grammar.backend, load_grammar(grammar, facts), enforced.checks)


@_refusing()
def alone(schema: str, facts: TokenizerFacts) -> Held:
    """Compile by llguidance alone, given the schema as it is."""
    grammar = llguidance.compile_json_schema(schema, facts, "flexible")
    return Held(grammar.backend, load_grammar(grammar, facts))


ENGINES: dict[str, Engine] = {"router": router, "any-order": any_order, "llguidance": alone}
