"""Compiles structural tags to one llguidance grammar, in which free text can't contain a trigger.

The schema of a tag is enforced as exactly as a schema of the whole answer.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.lark import (
    TERMINALS,
    LarkText,
    alternatives,
    none_of,
    quoted,
    regex,
    repeated,
    with_ecma_classes,
)
from radixrt.constrained.backends.tag_schemas import TagSchemas
from radixrt.constrained.backends.tags import TagContents, check_triggers, place_of_error
from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Choice,
    Compound,
    Either,
    Format,
    JsonSchema,
    Lark,
    Parameters,
    Regex,
    Repeated,
    Series,
    StructuralTag,
    Tag,
    Tokens,
    is_endless,
)
from radixrt.constrained.errors import CannotCompile
from radixrt.constrained.grammar import Compiled, Grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.constrained.tool_calls import first_characters


def compile_structural_tag(
    constraint: StructuralTag | Compound,
    facts: TokenizerFacts,
    whitespace: WhitespaceName,
    schemas: TagSchemas | None = None,
) -> Compiled:
    """The grammar, with checks of the schemas that are strict, and the keywords that it leaves out
    of the others.

    The name of a control token in ``begin``, ``end`` or ``triggers`` means that token.

    Args:
        schemas: what is known of the schemas; takes those that are new.

    Raises:
        CannotCompile: triggers and tags don't fit, or a content can't be held to.
    """
    text = _TagGrammar(constraint, facts, whitespace, schemas or TagSchemas({}))
    grammars = text.grammars()
    try:
        grammar = _compiled(grammars, facts, text.contents.is_ambiguous)
    except CannotCompile as error:

        def compiles(one: StructuralTag) -> bool:
            alone = _TagGrammar(one, facts, whitespace, TagSchemas({}))
            try:
                return bool(_compiled(alone.grammars(), facts, alone.contents.is_ambiguous))
            except CannotCompile:
                return False

        raise CannotCompile(f"{place_of_error(constraint, compiles)}{error}") from error
    return Compiled(
        grammar=grammar,
        checks=text.contents.checks(),
        checked=tuple(dict.fromkeys(text.contents.checked)),
        unenforced=tuple(dict.fromkeys(text.contents.unenforced)),
    )


def _compiled(grammars: list[dict[str, Any]], facts: TokenizerFacts, is_ambiguous: bool) -> Grammar:
    try:
        return llguidance.compile_grammars(grammars, facts, is_ambiguous=is_ambiguous)
    except CannotCompile as error:
        if "too deeply nested" not in str(error):
            raise
        raise CannotCompile(
            "It has too many of optional, star, plus, repeat, or and sequence within one another; at most some 28 are taken."
        ) from error


@dataclasses.dataclass(frozen=True)
class _FreeText:
    """The content of a tag that is free text, and its ends."""

    content: Format
    ends: tuple[str, ...]


class _TagGrammar:
    """Writes the Lark text and collects the grammars that it refers to by name."""

    def __init__(
        self,
        constraint: StructuralTag | Compound,
        facts: TokenizerFacts,
        whitespace: WhitespaceName,
        schemas: TagSchemas,
    ) -> None:
        self._constraint = constraint
        self._facts = facts
        self._text = LarkText(facts.special_names)
        self.contents = TagContents(constraint, facts, whitespace, self._text, schemas)

    def grammars(self) -> list[dict[str, Any]]:
        start = self._series([self._constraint])
        lark = f"start: {start}\n{TERMINALS}" + "\n".join(self._text.lines) + "\n"
        return [{"name": "tags", "lark_grammar": lark}, *self._text.named]

    # ------------------------------------------------------------ formats

    def _series(
        self, parts: Sequence[Format], ends: tuple[str, ...] = (), follows: bool = False
    ) -> str:
        """Parts in a row, and the end.

        Args:
            ends: of the tag of which this is the content.
            follows: more text may follow.
        """
        items = [item for part in parts for item in self._flat(part)]
        if ends and not (items and is_endless(items[-1])):
            items.append(Choice(options=ends))
        out, run = [], list[str]()
        for index, item in enumerate(items):
            if (text := self._regular(item)) is not None:
                run.append(text)
                continue
            out.append(self._run(run, item))
            run = []
            following = items[index + 1] if index + 1 < len(items) else None
            if isinstance(item, AnyText) and isinstance(following, Tokens):
                out.append(self._text_up_to(item, following))
            elif is_endless(item):
                out.append(self._endless(item, ends))
            else:
                out.append(self._one(item, follows or following is not None))
        out.append(self._run(run, AnyText() if follows else None))
        return " ".join(filter(None, out)) or '""'

    def _flat(self, part: Format) -> list[Any]:
        """The parts of a row; those of a tag alone are its beginning, its content and its end."""
        if isinstance(part, Series):
            return [item for each in part.elements for item in self._flat(each)]
        if part is not self._constraint and isinstance(part, StructuralTag) and _is_one_tag(part):
            (tag,) = part.tags
            if isinstance(tag.content, Parameters):
                return [part]
            begin = [Choice(options=(tag.begin,))] if tag.begin else []
            if is_endless(tag.content):
                return [*begin, _FreeText(tag.content, (tag.end, *tag.other_ends))]
            ends = tuple(dict.fromkeys((tag.end, *tag.other_ends)))
            end = [Choice(options=ends)] if ends != ("",) else []
            return [*begin, *self._flat(tag.content), *end]
        return [part]

    def _one(self, part: Format | _FreeText, follows: bool) -> str:
        """A part that is no single terminal, and ends by itself."""
        match part:
            case _FreeText():
                return self._endless(part.content, part.ends)
            case JsonSchema() | AnyJson() | Lark():
                return self.contents.grammar(part, None)
            case StructuralTag():
                return self._tags(part, ())
            case Choice():
                return "(" + " | ".join(map(self._text.literal, part.options)) + ")"
            case Either():
                return (
                    "("
                    + " | ".join(self._series([one], (), follows) for one in part.elements)
                    + ")"
                )
            case Repeated():
                self.contents.is_ambiguous = True
                body = self._series([part.content], (), part.most != 1 or follows)
                return repeated(f"({body})", part.least, part.most)
            case Tokens():
                return self._tokens(part)
        raise CannotCompile(
            "Inside a structural tag an EBNF grammar can't be used; write it as a regex, Lark or JSON schema."
        )

    def _regular(self, part: Format) -> str | None:
        """The expression of a terminal; None if the part is none."""
        match part:
            case Regex():
                pattern = with_ecma_classes(part.pattern)
                llguidance.compile_regex(pattern, self._facts)  # alone: ``a)|(b`` is none
                return regex(pattern)
            case Choice():
                if any(map(self._text.names_control_token, part.options)):
                    return None
                return regex(alternatives(part.options))
            case Series() | Either():
                texts = [self._regular(each) for each in part.elements]
                between = " " if isinstance(part, Series) else " | "
                return None if None in texts else f"({between.join(map(str, texts))})"
            case Repeated():
                text = self._regular(part.content)
                return None if text is None else repeated(f"({text})", part.least, part.most)
        return None

    def _run(self, texts: list[str], following: Format | _FreeText | None) -> str:
        """Terminals in a row as one, so that every way to divide the text between them is tried.
        What follows must not be able to go on with it: the lexer takes the longest text. Raises
        CannotCompile if it may."""
        if not texts:
            return ""
        name, text = f"RUN_{self._text.number()}", " ".join(texts)
        self._text.lines.append(f"{name}: {text}")
        if following is None or isinstance(following, Tokens):
            return name
        start = "SOME"
        if isinstance(following, JsonSchema | AnyJson):
            start = "(" + " | ".join(map(quoted, first_characters(following))) + ")"
        longer = f"start: X\nX: T & (T {start} ANY)\nT: {text}\n{TERMINALS}"
        try:
            llguidance.compile_lark(longer, self._facts)
        except CannotCompile as error:
            if "Nothing satisfies it" in str(error):
                return name
        raise CannotCompile(
            "After a text of a sequence it must be clear that it has ended, and here it could go on with what follows; put a "
            "const_string between them that the text can't contain."
        )

    def _tokens(self, part: Tokens) -> str:
        ids = sorted(set(map(self._token_id, part.tokens)))
        if not part.excluded:
            return f"<[{','.join(map(str, ids))}]>"
        apart = sorted({*ids, *self._facts.eos_token_ids})
        return f"<[^{','.join(map(str, apart))}]>"

    def _token_id(self, token: int | str) -> int:
        facts = self._facts
        found = token if isinstance(token, int) else facts.id_of(token)
        if found is None or found >= facts.vocab_size:
            raise CannotCompile(f"The model has no token {token!r}.")
        if found in facts.eos_token_ids:
            raise CannotCompile(
                f"The token {token!r} ends the answer, so it can't be a part of it."
            )
        return int(found)

    # ------------------------------------------------------------ free text

    def _endless(self, part: Format, ends: tuple[str, ...]) -> str:
        """Free text, and its end."""
        match part:
            case AnyText():
                return self._any_text(part, ends)
            case StructuralTag():
                return self._tags(part, ends)
            case Either():
                return "(" + " | ".join(self._endless(one, ends) for one in part.elements) + ")"
        return self._series([part], ends)

    def _text_up_to(self, part: AnyText, end: Tokens | None) -> str:
        """Text up to a token, or to the end of the answer."""
        if part.max_tokens is None:
            return f"{self._text.without(part.excludes)}?"
        if end is not None and end.excluded:
            raise CannotCompile("After a text with max_tokens one of some tokens must follow.")
        ids = {*self._facts.special_names.values(), *self._facts.eos_token_ids}
        ids |= set() if end is None else set(map(self._token_id, end.tokens))
        free = f"<[^{','.join(map(str, sorted(ids)))}]>"
        return repeated(free, 0, part.max_tokens)

    def _any_text(self, part: AnyText, ends: tuple[str, ...]) -> str:
        """Text up to the first occurrence of an end."""
        if part.max_tokens is not None and any(ends):
            if len(ends) > 1 or ends[0] not in self._facts.special_names:
                raise CannotCompile(
                    "Where a text with max_tokens ends, the answer must end, or a control token of the model must stand, such as "
                    "</think>: other texts may lie within tokens."
                )
            return f"{self._text_up_to(part, None)} {self._text.literal(ends[0])}"
        if part.max_tokens is not None:
            return self._text_up_to(part, None)
        if not any(ends):
            if self._constraint is part or not ends:
                return f"{self._text.without(part.excludes)}?"
            raise CannotCompile("A tag whose content is any text needs an end; give one.")
        return self._text.until(ends, part.excludes)

    # ------------------------------------------------------------ tags

    def _tags(self, part: StructuralTag, ends: tuple[str, ...]) -> str:
        check_triggers(part)
        number = self._text.number()
        rules = [
            self._tag(part, f"{number}_{index}", index, tag, ends)
            for index, tag in enumerate(part.tags)
            if tag.begin or not part.lists
        ]
        self._text.lines.append(f"tag_{number}: " + " | ".join(rules))
        if part.before:
            return f"{self._before(part, number)} tag_{number} {self._more_tags(part, number)}"
        if part.lists:
            return self._lists(part, number)
        if not part.free_text:
            rest = self._more_tags(part, number)
            return f"tag_{number} {rest}" if part.min_tags else f"(tag_{number} {rest})?"
        tags = repeated(f"tag_{number}", part.min_tags, part.max_tags)
        stops = (*part.triggers, *part.excludes)
        if any(ends):
            return f"{tags} {self._text.until(ends, stops)}"
        return f"{tags} {self._text.without(stops)}?"

    def _before(self, part: StructuralTag, number: int) -> str:
        """Any number of the tags that may stand before the others."""
        ways = [
            f"{self._text.literal(tag.begin)} {self._content(part, -1, tag)}" for tag in part.before
        ]
        self._text.lines.append(f"before_{number}: " + " | ".join(ways))
        return f"before_{number}*"

    def _more_tags(self, part: StructuralTag, number: int) -> str:
        """The tags after the first, where there is no free text between them."""
        separator, most = self._text.literal(part.separator), part.max_tags
        more = None if most is None else most - 1
        return repeated(f"({separator} tag_{number})", max(part.min_tags - 1, 0), more)

    def _lists(self, part: StructuralTag, number: int) -> str:
        """All tags in one list, or free text, or the content of a tag without a beginning."""
        openings = tuple(opening for opening, _ in part.lists)
        rest, ways = self._more_tags(part, number), []
        for index, (opening, closing) in enumerate(part.lists):
            lead, first = self._text.literal(opening), f"tag_{number}"
            if part.not_text:  # with the first tag in one terminal, which no free text begins with
                lead, first = "", " | ".join(self._firsts(part, number, index, opening))
            elif part.free_text and self._text.names_control_token(opening):
                lead = f"{self._text.without(openings)}? {lead}"
            elif part.free_text:
                stop = "(" + " | ".join(map(quoted, openings)) + ")"
                lead = f"HEAD_{number}_{index}"
                self._text.lines.append(f"{lead}: (ANY {quoted(opening)}) & ~(ANY {stop} SOME)")
            ways.append(f"{lead} ({first}) {rest} {self._text.literal(closing)}")
        ways += [self._content(part, at, tag) for at, tag in enumerate(part.tags) if not tag.begin]
        if part.min_tags == 0:
            ways.append('""')
            if part.not_text:
                self._text.lines.append(f"PLAIN_{number}: SOME & ~({regex(part.not_text)} ANY)")
            if part.free_text:
                ways.append(f"PLAIN_{number}" if part.not_text else self._text.without(openings))
        return "(" + " | ".join(ways) + ")"

    def _firsts(
        self, part: StructuralTag, number: int, list_index: int, opening: str
    ) -> Iterator[str]:
        """The rules of the first tag of a list, with the opening."""
        for index, tag in enumerate(part.tags):
            if not tag.begin:
                continue
            name = f"first_{number}_{list_index}_{index}"
            self._text.lines.append(
                f"{name}: {self._text.literal(opening + tag.begin)} inner_{number}_{index}"
            )
            yield name

    def _tag(
        self, part: StructuralTag, name: str, index: int, tag: Tag, ends: tuple[str, ...]
    ) -> str:
        """Define the rule of one tag, with the free text before it; returns its name.

        A trigger that is a control token can't occur in text. Its name in letters must not occur in
        text either.
        """
        begin = self._text.literal(tag.begin)
        if part.free_text and not part.lists:
            trigger = next(t for t in part.triggers if tag.begin.startswith(t))
            others = (*part.excludes, *(end for end in ends if end))
            stops = (*part.triggers, *others)
            if self._text.names_control_token(trigger):
                begin = f"{self._text.without(stops)}? {begin}"
            else:
                head, rest = f"HEAD_{name}", self._text.literal(tag.begin[len(trigger) :])
                stop = "(" + " | ".join(map(quoted, stops)) + ")"
                self._text.lines.append(
                    f"{head}: (ANY {quoted(trigger)}) & ~(ANY {stop} SOME){none_of(others)}"
                )
                begin = f"{head} {rest}"
        self._text.lines.append(f"inner_{name}: {self._content(part, index, tag)}")
        self._text.lines.append(f"tag_{name}: {begin} inner_{name}")
        return f"tag_{name}"

    def _content(self, part: StructuralTag, index: int, tag: Tag) -> str:
        """The content between begin and end, and the end."""
        ends = tuple(dict.fromkeys((tag.end, *tag.other_ends)))
        match tag.content:
            case JsonSchema() | AnyJson() | Lark():
                place = index if part is self._constraint else None
                grammar = self.contents.grammar(tag.content, place, tag)
                end = " | ".join(map(self._text.literal, ends))
                return f"{grammar} ({end})" if len(ends) > 1 else f"{grammar} {end}"
            case Parameters():
                rules = self.contents.parameters(part, index, tag, tag.content)
                return f"{rules} {self._text.literal(tag.end)}"
            case Regex() | Choice():
                text = self._regular(tag.content)
                if text is not None and len(ends) == 1:
                    return self._text.ended(text, tag.end)
        if is_endless(tag.content):
            is_last = part.max_tags == 1 and not part.free_text and not any(ends)
            return self._endless(tag.content, () if is_last else ends)
        return self._series([tag.content], ends if any(ends) else (), True)


def _is_one_tag(part: StructuralTag) -> bool:
    one = (len(part.tags), part.min_tags, part.max_tags) == (1, 1, 1)
    return one and not part.free_text
