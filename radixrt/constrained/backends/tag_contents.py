"""Writes the contents of tags that are grammars of their own: schemas, Lark grammars, and parameters of tool calls."""

from typing import Any

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.any_order import lark_in_any_order
from radixrt.constrained.backends.checked_tags import checked_tags, finds_content
from radixrt.constrained.backends.json_string_lark import lark_in_json_string
from radixrt.constrained.backends.lark_text import LarkText
from radixrt.constrained.backends.parameter_rules import ParameterRules
from radixrt.constrained.backends.schema_plans import SchemaPlans
from radixrt.constrained.constraint import (
    AnyJson,
    Compound,
    JsonSchema,
    Lark,
    Parameters,
    StructuralTag,
    Tag,
)
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import Checks, SpanCheck, Unenforced
from radixrt.constrained.tokenizer_facts import TokenizerFacts


class TagContents:
    """Collects the grammars, the checks of values that they leave, and the keywords that nothing enforces.

    Args:
        text: of the grammar that refers to them.
        plans: of their schemas.
    """

    def __init__(
        self,
        constraint: StructuralTag | Compound,
        facts: TokenizerFacts,
        whitespace: WhitespaceName,
        text: LarkText,
        plans: SchemaPlans,
    ) -> None:
        self._plans = plans
        self._constraint = constraint
        self._facts = facts
        self._whitespace = whitespace
        self._text = text
        self.named: list[dict[str, Any]] = []
        """The grammars, with the names by which the text refers to them."""
        self._checks: dict[int, tuple[SpanCheck, ...]] = {}
        """By the position of the tag in the constraint."""
        self.checked: list[Unenforced] = []
        self.unenforced: list[Unenforced] = []
        self.is_ambiguous = False
        """See :class:`radixrt.constrained.grammar.Grammar`."""

    def checks(self) -> Checks:
        """Of the contents, after all of them were written."""
        if not any(self._checks.values()):
            return ()
        assert isinstance(self._constraint, StructuralTag)
        return checked_tags(self._constraint, self._checks)

    def parameters(self, part: StructuralTag, index: int, tag: Tag, content: Parameters) -> str:
        """Define the rules of a call's parameters; returns the name of the first."""
        is_found = part is self._constraint and finds_content(part, tag)
        self._plans.begin(content)
        try:
            rules = ParameterRules(
                content,
                f"p{self._text.number()}",
                self._text.literal,
                self._text.names_control_token,
                llguidance.json_schema_options(self._whitespace),
                allow_checks=is_found,
                plan=self._plans.plan,
            )
        except CannotCompile as error:
            raise CannotCompile(f"In {_place_of(tag)}: {error}") from error
        self._plans.end(content)
        self._text.lines += rules.lines
        self.named += rules.named
        if is_found:
            self._checks[index] = tuple(rules.checks)
        self.checked += rules.checked
        self.unenforced += rules.unenforced
        return rules.start

    def grammar(
        self, content: JsonSchema | AnyJson | Lark, place: int | None, tag: Tag | None = None
    ) -> str:
        """Define a grammar of its own; returns the reference to it.

        Args:
            place: position of the tag in the constraint, if its values can be checked.
        """
        name = f"content_{self._text.number()}"
        if isinstance(content, Lark):
            self.is_ambiguous = True
            text = content.grammar
            try:
                llguidance.compile_lark(text, self._facts)  # alone, for an error with its own lines
                text = lark_in_json_string(text) if content.in_json_string else text
            except CannotCompile as error:
                raise CannotCompile(f"In {_place_of(tag)}: {error}") from error
            self.named.append({"name": name, "lark_grammar": text})
            return f"@{name}"
        schema = self._schema(content, place, tag)
        if isinstance(content, JsonSchema) and content.any_order:
            options = llguidance.json_schema_options(self._whitespace)
            self.named.append({"name": name, "lark_grammar": lark_in_any_order(schema, options)})
        else:
            self.named.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def _schema(
        self, content: JsonSchema | AnyJson, place: int | None, tag: Tag | None
    ) -> dict[str, Any]:
        if isinstance(content, JsonSchema):
            self._plans.begin(content)
            try:
                plan = self._plans.plan(
                    content.schema,
                    strict=content.strict,
                    allow_checks=content.strict
                    and place is not None
                    and tag is not None
                    and finds_content(self._constraint, tag),
                )
            except CannotEnforce as error:
                raise CannotCompile(f"In {_place_of(tag)}: {error}") from error
            self._plans.end(content)
            if place is not None:
                self._checks[place] = plan.checks
            self.checked += plan.checked
            self.unenforced += plan.unenforced
            schema = plan.schema
        else:
            schema = {"type": "object"} if content.object_only else {}
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"enum": []}
        return {**schema, "x-guidance": llguidance.json_schema_options(self._whitespace)}


def _place_of(tag: Tag | None) -> str:
    """The place of a content, for errors."""
    if tag is None:
        return "a part of the structural tag"
    return f"the tool {tag.tool!r}" if tag.tool else f"the tag {tag.begin!r}"
