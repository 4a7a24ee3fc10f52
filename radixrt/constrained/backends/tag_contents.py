"""Writes the contents of tags that are grammars of their own: schemas, Lark grammars, and
parameters of tool calls."""

import dataclasses
from typing import Any

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.any_order import lark_in_any_order
from radixrt.constrained.backends.json_string_lark import lark_in_json_string
from radixrt.constrained.backends.lark_text import LarkText
from radixrt.constrained.backends.parameter_rules import ParameterRules
from radixrt.constrained.backends.tag_schemas import TagSchemas
from radixrt.constrained.backends.tags import checked_tags, finds_content
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


@dataclasses.dataclass(eq=False)
class TagContents:
    """Collects the grammars of contents, the checks that they leave, and unenforced keywords."""

    _constraint: StructuralTag | Compound
    _facts: TokenizerFacts
    _whitespace: WhitespaceName
    _text: LarkText
    """The text of the grammar that refers to them."""
    _schemas: TagSchemas
    checked: list[Unenforced] = dataclasses.field(default_factory=list)
    unenforced: list[Unenforced] = dataclasses.field(default_factory=list)
    is_ambiguous: bool = False
    """See :class:`radixrt.constrained.grammar.Grammar`."""
    _checks: dict[int, tuple[SpanCheck, ...]] = dataclasses.field(default_factory=dict)
    """Checks by the position of their tag in the constraint."""

    def checks(self) -> Checks:
        """The checks of all contents; call it after they were written."""
        if not any(self._checks.values()):
            return ()
        assert isinstance(self._constraint, StructuralTag)
        return checked_tags(self._constraint, self._checks)

    def parameters(self, part: StructuralTag, index: int, tag: Tag, content: Parameters) -> str:
        """Define the rules of a call's parameters; returns the name of the first."""
        is_found = part is self._constraint and finds_content(part, tag)
        self._schemas.begin(content)
        try:
            rules = ParameterRules(
                content,
                self._text,
                llguidance.json_schema_options(self._whitespace),
                allow_checks=is_found,
                enforce=self._schemas.enforce,
            )
        except CannotCompile as error:
            raise CannotCompile(f"In {_place_of(tag)}: {error}") from error
        self._schemas.end(content)
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
            self._text.named.append({"name": name, "lark_grammar": text})
            return f"@{name}"
        schema = self._schema(content, place, tag)
        if isinstance(content, JsonSchema) and content.any_order:
            options = llguidance.json_schema_options(self._whitespace)
            self._text.named.append(
                {"name": name, "lark_grammar": lark_in_any_order(schema, options)}
            )
        else:
            self._text.named.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def _schema(
        self, content: JsonSchema | AnyJson, place: int | None, tag: Tag | None
    ) -> dict[str, Any]:
        if isinstance(content, JsonSchema):
            self._schemas.begin(content)
            try:
                found = self._schemas.enforce(
                    content.schema,
                    strict=content.strict,
                    allow_checks=content.strict
                    and place is not None
                    and tag is not None
                    and finds_content(self._constraint, tag),
                )
            except CannotEnforce as error:
                raise CannotCompile(f"In {_place_of(tag)}: {error}") from error
            self._schemas.end(content)
            if place is not None:
                self._checks[place] = found.checks
            self.checked += found.checked
            self.unenforced += found.unenforced
            schema = found.schema
        else:
            schema = {"type": "object"} if content.object_only else {}
        return {**schema, "x-guidance": llguidance.json_schema_options(self._whitespace)}


def _place_of(tag: Tag | None) -> str:
    """The place of a content, for errors."""
    if tag is None:
        return "a part of the structural tag"
    return f"the tool {tag.tool!r}" if tag.tool else f"the tag {tag.begin!r}"
