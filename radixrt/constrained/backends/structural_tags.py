"""Compiles structural tags to one llguidance grammar, in which free text can't contain a trigger.

xgrammar has structural tags of its own, but compiles the schemas inside them with its own converter, which
drops keywords. Here the schema of a tag is enforced as exactly as a schema of the whole answer.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from radixrt.base.config import WhitespaceName
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.any_order import lark_in_any_order
from radixrt.constrained.backends.json_string_lark import lark_in_json_string
from radixrt.constrained.backends.lark_rules import check_lark
from radixrt.constrained.backends.parameter_rules import ParameterRules
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Choice,
    JsonSchema,
    Lark,
    Parameters,
    Regex,
    StructuralTag,
    Tag,
)
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.grammar import CheckedTag, CheckedTags, Checks, Compiled, Unenforced
from radixrt.constrained.json_schema.auditing.audit import JsonPlan, plan_json_schema
from radixrt.constrained.regex_text import alternatives, with_ecma_classes
from radixrt.constrained.tokenizer_facts import TokenizerFacts

MAX_TAGS = 4096
_JSON_BEGINS = tuple('{["-0123456789tfn \t\r\n')

_TEXT = """
ANY: /(?s:.*)/
SOME: /(?s:.+)/
"""


def compile_structural_tag(
    constraint: StructuralTag, facts: TokenizerFacts, whitespace: WhitespaceName
) -> Compiled:
    """The grammar, with checks of the schemas that are strict, and the keywords that it leaves out of the others.

    The name of a control token in ``begin``, ``end`` or ``triggers`` means that token.

    Raises:
        CannotCompile: triggers and tags don't fit, or a content can't be held to.
    """
    check_triggers(constraint)
    text = _TagGrammar(constraint, facts, whitespace)
    return Compiled(
        grammar=llguidance.compile_grammars(text.grammars(), facts),
        checks=text.checks(),
        checked=tuple(text.checked),
        unenforced=tuple(text.unenforced),
    )


def check_triggers(constraint: StructuralTag) -> None:
    """Raises:
    CannotCompile: it isn't certain which tag a trigger begins, or how many tags there may be.
    """
    if not constraint.tags or len(constraint.tags) > MAX_TAGS:
        raise CannotCompile(
            f"There are {len(constraint.tags)} tags; give between 1 and {MAX_TAGS}."
        )
    most = constraint.max_tags
    if constraint.min_tags < 0 or (most is not None and most < max(constraint.min_tags, 1)):
        raise CannotCompile(f"From {constraint.min_tags} to {most} tags are no number of tags.")
    begins = sorted(
        {tag.begin for tag in constraint.tags if not _is_told_from_others(tag, constraint)}
    )
    for begin, following in itertools.pairwise(begins):
        if following.startswith(begin):
            raise CannotCompile(
                f"The tag {begin!r} begins like {following!r}, so a text may be either; let each go its own way."
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


def _is_told_from_others(tag: Tag, constraint: StructuralTag) -> bool:
    """Whether the tag is JSON with an empty ``begin``, and every other tag begins as no JSON does."""
    if tag.begin or constraint.free_text or not isinstance(tag.content, JsonSchema | AnyJson):
        return False
    others = [one.begin for one in constraint.tags if one is not tag]
    return all(begin and not begin.startswith(_JSON_BEGINS) for begin in others)


class _TagGrammar:
    """Writes the Lark text and collects the grammars that it refers to by name."""

    def __init__(
        self, constraint: StructuralTag, facts: TokenizerFacts, whitespace: WhitespaceName
    ) -> None:
        self._constraint = constraint
        self._facts = facts
        self._whitespace = whitespace
        self._control = facts.special_names
        self._named: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._plans: dict[str, JsonPlan] = {}
        """By the name of the content."""
        self.checked: list[Unenforced] = []
        self.unenforced: list[Unenforced] = []

    def checks(self) -> Checks:
        """Of the contents, after :meth:`grammars`."""
        if not any(plan.checks for plan in self._plans.values()):
            return ()
        constraint = self._constraint
        tags = [
            CheckedTag(
                begin=tag.begin,
                end=tag.end,
                is_json=isinstance(tag.content, JsonSchema | AnyJson),
                checks=tuple(
                    msgspec.structs.replace(check, tag=tag.begin)
                    for plan in [self._plans.get(f"content_{index}")]
                    if plan
                    for check in plan.checks
                ),
            )
            for index, tag in enumerate(constraint.tags)
        ]
        return CheckedTags(
            tags=tuple(tags),
            triggers=constraint.triggers,
            free_text=constraint.free_text,
            separator=constraint.separator,
        )

    def _finds_content(self, tag: Tag) -> bool:
        """Whether the contents of the tag can be told from the text around them, so that they can be checked."""
        tags = self._constraint.tags
        return (
            all(isinstance(each.content, JsonSchema | AnyJson | AnyText) for each in tags)
            and len({each.begin for each in tags}) == len(tags)
            and not re.match(r"[-+.\w]", tag.end)
        )

    def grammars(self) -> list[dict[str, Any]]:
        start = self._start()
        lark = f"start: {start}\n{_TEXT}" + "\n".join(self._lines) + "\n"
        return [{"name": "tags", "lark_grammar": lark}, *self._named]

    def _start(self) -> str:
        names = [self._tag(index, tag) for index, tag in enumerate(self._constraint.tags)]
        self._lines.append("tag: " + " | ".join(names))
        if self._constraint.lists:
            return self._lists()
        if not self._constraint.free_text:
            return self._tags_alone()
        self._define_free_text()
        tags = _repeated("tag", self._constraint.min_tags, self._constraint.max_tags)
        return f"{tags} TAIL?"

    def _tags_alone(self) -> str:
        least, most = self._constraint.min_tags, self._constraint.max_tags
        if self._constraint.lists:
            least = max(least, 1)
        separator = self._literal(self._constraint.separator)
        rest = _repeated(
            f"({separator} tag)", max(least - 1, 0), None if most is None else most - 1
        )
        return f"tag {rest}" if least else f"(tag {rest})?"

    def _lists(self) -> str:
        """All tags in one list, or free text."""
        constraint, ways = self._constraint, []
        if constraint.free_text and not constraint.not_text:
            self._define_free_text()
        for number, (opening, closing) in enumerate(constraint.lists):
            lead, first = self._literal(opening), "tag"
            if (
                constraint.not_text
            ):  # with the first tag in one terminal, which no free text begins with
                lead, first = "", " | ".join(self._firsts(number, opening))
            elif constraint.free_text and self._names_control_token(opening):
                lead = f"TAIL? {lead}"
            elif constraint.free_text:
                lead = f"HEAD_{number}"
            rest = self._tags_alone().removeprefix("tag ")
            ways.append(f"{lead} ({first}) {rest} {self._literal(closing)}")
        if constraint.min_tags == 0:
            ways.append('""')
            if constraint.not_text:
                self._lines.append(f"PLAIN: SOME & ~({_regex(constraint.not_text)} ANY)")
            if constraint.free_text:
                ways.append("PLAIN" if constraint.not_text else "TAIL")
        return " | ".join(ways)

    def _firsts(self, number: int, opening: str) -> Iterator[str]:
        """The rules of the first tag of a list, with the opening."""
        for index, tag in enumerate(self._constraint.tags):
            name = f"first_{number}_{index}"
            self._lines.append(f"{name}: {self._literal(opening + tag.begin)} inner_{index}")
            yield name

    def _define_free_text(self) -> None:
        """TAIL: text without a trigger. HEAD_i: text that ends with trigger i and has no trigger before it.

        A trigger that is a control token can't occur in text, so it ends no HEAD. Its name in letters must not
        occur in text either.
        """
        triggers = self._constraint.triggers or [opening for opening, _ in self._constraint.lists]
        self._lines.append("TRIGGER: " + " | ".join(map(_quoted, triggers)))
        self._lines.append("TAIL: SOME & ~(ANY TRIGGER ANY)")
        for index, trigger in enumerate(triggers):
            if not self._names_control_token(trigger):
                self._lines.append(f"HEAD_{index}: (ANY {_quoted(trigger)}) & ~(ANY TRIGGER SOME)")

    def _tag(self, index: int, tag: Tag) -> str:
        """Define the rule of one tag, with the free text before it; returns its name."""
        begin = self._literal(tag.begin)
        if self._constraint.free_text and not self._constraint.lists:
            number, trigger = next(
                (i, t) for i, t in enumerate(self._constraint.triggers) if tag.begin.startswith(t)
            )
            if self._names_control_token(trigger):
                begin = f"TAIL? {begin}"
            else:
                begin = f"HEAD_{number} {self._literal(tag.begin[len(trigger) :])}"
        self._lines.append(f"inner_{index}: {self._content(index, tag)}")
        self._lines.append(f"tag_{index}: {begin} inner_{index}")
        return f"tag_{index}"

    def _content(self, index: int, tag: Tag) -> str:
        """The content between begin and end, and the end."""
        name, content, end = f"content_{index}", tag.content, self._literal(tag.end)
        match content:
            case JsonSchema() | AnyJson():
                schema = self._schema(name, tag)
                if isinstance(content, JsonSchema) and content.any_order:
                    options = llguidance.json_schema_options(self._whitespace)
                    text = lark_in_any_order(schema, options)
                    self._named.append({"name": name, "lark_grammar": text})
                else:
                    self._named.append({"name": name, "json_schema": schema})
                return f"@{name} {end}"
            case Lark():
                check_lark(content.grammar)
                text = content.grammar
                text = lark_in_json_string(text) if content.in_json_string else text
                self._named.append({"name": name, "lark_grammar": text})
                return f"@{name} {end}"
            case Regex():
                pattern = with_ecma_classes(content.pattern)
                llguidance.compile_regex(pattern, self._facts)  # alone: ``a)|(b`` is none
                return self._terminal(index, _regex(pattern), tag.end)
            case Choice():
                return self._terminal(index, _regex(alternatives(content.options)), tag.end)
            case AnyText():
                return self._any_text(index, tag.end)
            case Parameters():
                options = llguidance.json_schema_options(self._whitespace)
                rules = ParameterRules(
                    content, f"p{index}", self._literal, self._names_control_token, options
                )
                self._lines += rules.lines
                self._named += rules.named
                self.unenforced += rules.unenforced
                return f"{rules.start} {end}"
            case _:
                raise CannotCompile(
                    "Inside a structural tag an EBNF grammar can't be used; write it as a regex, Lark or JSON schema."
                )

    def _schema(self, name: str, tag: Tag) -> dict[str, Any]:
        content = tag.content
        if isinstance(content, JsonSchema):
            try:
                plan = plan_json_schema(
                    content.schema,
                    strict=content.strict,
                    backend="llguidance",
                    allow_checks=content.strict
                    and not self._constraint.lists
                    and self._finds_content(tag),
                )
            except CannotEnforce as error:
                raise CannotCompile(f"In the tag {tag.begin!r}: {error}") from error
            self._plans[name] = plan
            self.checked += plan.checked
            self.unenforced += plan.unenforced
            schema = plan.schema
        else:
            assert isinstance(content, AnyJson)
            schema = {"type": "object"} if content.object_only else {}
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"enum": []}
        return {**schema, "x-guidance": llguidance.json_schema_options(self._whitespace)}

    def _terminal(self, index: int, text: str, end: str) -> str:
        """Content and end as one terminal, so that every way to divide the text between them is tried; a control
        token in the end begins a terminal of its own."""
        letters, control = self._split_at_control_token(end)
        self._lines.append(f"TEXT_{index}: {text} {_quoted(letters) if letters else ''}")
        return f"TEXT_{index} {self._literal(control)}"

    def _any_text(self, index: int, end: str) -> str:
        """Text up to the first occurrence of the end."""
        if not end:
            raise CannotCompile("A tag whose content is any text needs an end; give one.")
        letters, control = self._split_at_control_token(end)
        if control:  # no text has such a token in it
            self._lines.append(f"TEXT_{index}: {f'ANY {_quoted(letters)}' if letters else 'SOME'}")
            return f"TEXT_{index}{'' if letters else '?'} {self._literal(control)}"
        quoted = _quoted(end)
        self._lines.append(f"TEXT_{index}: (ANY {quoted}) & ~(ANY {quoted} SOME)")
        return f"TEXT_{index}"

    def _split_at_control_token(self, text: str) -> tuple[str, str]:
        """The text before the first control token, and the rest."""
        first = min((text.find(name) for name in self._control if name in text), default=len(text))
        return text[:first], text[first:]

    def _names_control_token(self, text: str) -> bool:
        return any(name in text for name in self._control)

    def _literal(self, text: str) -> str:
        """A fixed text as a sequence of terminals; control tokens by their ids."""
        if not text:
            return ""
        names = sorted(self._control, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return " ".join(
            f"<[{self._control[piece]}]>" if piece in self._control else _quoted(piece)
            for piece in pieces
            if piece
        )


def _repeated(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"{item}{{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/(" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", pattern, flags=re.DOTALL) + ")/"
