"""Writes the contents of tags that are grammars of their own (schemas, Lark grammars, parameters of tool
calls), and finds out where each tag begins, whether its content is found, and which does not
compile."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.any_order import lark_in_any_order
from radixrt.constrained.backends.json_string_lark import lark_in_json_string
from radixrt.constrained.backends.lark import LarkText
from radixrt.constrained.backends.parameter_rules import ParameterRules
from radixrt.constrained.backends.tag_schemas import TagSchemas
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Compound,
    Constraint,
    JsonSchema,
    Lark,
    Parameters,
    StructuralTag,
    Tag,
)
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import (
    CheckedParameters,
    CheckedTag,
    CheckedTags,
    Checks,
    SpanCheck,
    Unenforced,
)
from radixrt.constrained.json_schema.keywords import pointer_of
from radixrt.constrained.parameters import (
    STYLES,
    Form,
    any_parameter,
    declared_parameters,
    takes_any_name,
)
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.constrained.tool_calls import begins_json

MAX_TAGS = 4096


def check_triggers(constraint: StructuralTag) -> None:
    """Raises CannotCompile if it isn't certain which tag begins, or how many there may be."""
    if not constraint.tags or len(constraint.tags) > MAX_TAGS:
        raise CannotCompile(
            f"There are {len(constraint.tags)} tags; give between 1 and {MAX_TAGS}."
        )
    most = constraint.max_tags
    if constraint.min_tags < 0 or (most is not None and most < max(constraint.min_tags, 1)):
        raise CannotCompile(f"From {constraint.min_tags} to {most} tags are no number of tags.")
    begins = sorted(
        {_certain(tag) for tag in constraint.tags if not _is_told_from_others(tag, constraint)}
    )
    for begin, following in itertools.pairwise(begins):
        if following.startswith(begin):
            raise CannotCompile(
                f"The tag {begin!r} begins like {following!r}, so a text may be either. Change one, so that neither begins with the other."
            )
    if not constraint.free_text or constraint.lists:
        return
    for trigger in constraint.triggers:
        if not trigger or not any(tag.begin.startswith(trigger) for tag in constraint.tags):
            raise CannotCompile(f"The trigger {trigger!r} is not how any tag begins.")
    for tag in constraint.tags:
        if (count := sum(map(tag.begin.startswith, constraint.triggers))) != 1:
            raise CannotCompile(
                f"The tag that begins with {tag.begin!r} must begin with one trigger, and does with {count}."
            )


def _certain(tag: Tag) -> str:
    """The text with which every occurrence of a tag begins."""
    if not isinstance(tag.content, Parameters):
        return tag.begin
    next_marks = zip(STYLES[tag.content.style].opening[0], tag.end, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], next_marks)
    return tag.begin + "".join(character for character, _ in same)


def _is_told_from_others(tag: Tag, constraint: StructuralTag) -> bool:
    """Whether the tag is JSON with an empty ``begin``, and no other tag begins as JSON does."""
    if tag.begin or constraint.free_text or not isinstance(tag.content, JsonSchema | AnyJson):
        return False
    openings = [opening for opening, _ in constraint.lists] or [""]
    others = [one.begin for one in constraint.tags if one is not tag]
    return not any(
        begins_json(opening + begin, tag.content) for opening in openings for begin in others
    )


def finds_content(constraint: Constraint, tag: Tag) -> bool:
    """Whether the content of one of the constraint's tags can be told from the text around it."""
    if not isinstance(constraint, StructuralTag):
        return False
    tags, separator = constraint.tags, constraint.separator
    findable = JsonSchema | AnyJson | AnyText | Parameters
    return (
        not any(
            end.startswith(separator + each.begin)
            for _, end in constraint.lists
            for each in tags
            if each.begin
        )
        and all(isinstance(each.content, findable) for each in tags)
        and not any(each.other_ends for each in tags)
        and len({each.begin for each in tags}) == len(tags)
        and not re.match(r"[-+.\w]", tag.end)
    )


def checked_tags(
    constraint: StructuralTag, checks: Mapping[int, tuple[SpanCheck, ...]]
) -> CheckedTags:
    """The tags for the search for their contents.

    Args:
        checks: by the position of the tag.
    """
    return CheckedTags(
        tags=(
            *(_tag(tag, checks.get(index, ())) for index, tag in enumerate(constraint.tags)),
            *(_tag(tag, ()) for tag in constraint.before),
        ),
        triggers=constraint.triggers,
        free_text=constraint.free_text,
        separator=constraint.separator,
        lists=constraint.lists,
        begins_answer=bool(constraint.not_text),
    )


def _tag(tag: Tag, checks: tuple[SpanCheck, ...]) -> CheckedTag:
    parameters = None
    if isinstance(tag.content, Parameters):
        schema, style = json.loads(tag.content.schema.schema), tag.content.style
        every = [any_parameter(schema)] if takes_any_name(schema) else declared_parameters(schema)
        texts = tuple(one.name for one in every if one.form is not Form.JSON)
        parameters = CheckedParameters(style=style, texts=texts, end=tag.end)
    return CheckedTag(
        begin=tag.begin,
        end="" if parameters else tag.end,
        is_json=isinstance(tag.content, JsonSchema | AnyJson | Parameters),
        checks=tuple(msgspec.structs.replace(check, tag=tag.begin) for check in checks),
        parameters=parameters,
    )


replace = msgspec.structs.replace


def place_of_error(constraint: Constraint, compiles: Callable[[StructuralTag], bool]) -> str:
    """The beginning of an error: the first tool that does not compile alone, with the JSON pointer
    of the first such property of its parameters; empty if each tool compiles alone.

    Args:
        compiles: tells whether a constraint does.
    """
    if not isinstance(constraint, StructuralTag):
        return ""
    for tag in constraint.tags:
        if tag.tool and not compiles(_with(constraint, tag)):
            for pointer, part in _properties(tag):
                if not compiles(_with(constraint, part)):
                    return f"In the tool {tag.tool!r} at {pointer}: "
            return f"In the tool {tag.tool!r}: "
    return ""


def _with(constraint: StructuralTag, tag: Tag) -> StructuralTag:
    """The constraint with one tag alone."""
    triggers = tuple(one for one in constraint.triggers if tag.begin.startswith(one))
    return replace(constraint, tags=(tag,), triggers=triggers or constraint.triggers)


def _properties(tag: Tag) -> Iterator[tuple[str, Tag]]:
    """The pointer of each property of the parameters, and the tag with this property alone."""
    content = tag.content
    if not isinstance(content, JsonSchema | Parameters):
        return
    schema = content if isinstance(content, JsonSchema) else content.schema
    given: Any = json.loads(schema.schema)
    properties = given.get("properties") if isinstance(given, dict) else None
    for name, value in properties.items() if isinstance(properties, dict) else ():
        others = {key: given[key] for key in given if key not in ("properties", "required")}
        alone = replace(schema, schema=json.dumps({**others, "properties": {name: value}}))
        part = alone if isinstance(content, JsonSchema) else replace(content, schema=alone)
        yield pointer_of(("properties", name)), replace(tag, content=part)


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
