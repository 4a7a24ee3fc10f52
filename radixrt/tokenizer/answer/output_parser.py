"""Splits an answer's text into reasoning, content and tool calls."""

from bisect import bisect_left
from typing import Any, NamedTuple

from msgspec.structs import replace

from radixrt.base.errors import wrong
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.tags import GrammarStart, SymbolsOf
from radixrt.constrained.constraint import StructuralTag
from radixrt.messages.message import ToolCall
from radixrt.messages.requests import ChatPrompt, GenerateRequest
from radixrt.parsers.harmony import ASSISTANT, FINAL, MARKS, MESSAGE, HarmonyParser
from radixrt.parsers.reasoning import (
    FORMATS,
    PROMPT_BEGIN_TOKENS,
    PROMPT_END_TOKENS,
    ReasoningParser,
)
from radixrt.parsers.tool_calls.parser import ToolCallParser
from radixrt.parsers.tool_calls.registry import FORMATS as TOOL_CALL_FORMATS
from radixrt.tokenizer.vocabulary import Vocabulary

HARMONY = "harmony"
"""A format of reasoning and of tool calls whose answers one parser reads."""


class OutputParser:
    """Splits the text of an answer while it is generated, as its request asks."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: ToolCallParser | None,
        start: GrammarStart | None = None,
        symbols_of: SymbolsOf | None = None,
        messages: HarmonyParser | None = None,
        mark_ids: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            reasoning: None: the text has no reasoning to split off.
            calls: None: the text has no tool calls to split off.
            start: where a grammar begins after reasoning; None: nowhere.
            symbols_of: of the vocabulary, if there is a ``start``.
            messages: splits everything off, in place of the other two.
            mark_ids: the tokens of its marks.
        """
        self._messages = messages
        self._mark_ids = mark_ids
        self._reasoning = reasoning
        self._calls = calls
        self._start = start
        self._symbols_of = symbols_of
        self._num_characters = 0
        self._ends: list[int] = []
        """The place where each token of an answer with reasoning ends, in characters, until the
        reasoning has ended."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, with its tags."""
        parser = self._messages or self._reasoning
        if parser is None or parser.end == 0:
            return 0
        if parser.end is None:
            return len(self._ends)
        return min(bisect_left(self._ends, parser.end) + 1, len(self._ends))

    @staticmethod
    def for_request(
        request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
    ) -> "OutputParser":
        if request.parse_reasoning == HARMONY:
            return _harmony_parser(request, vocabulary, prompt_ids)
        calls = None
        held = request.constraint if isinstance(request.constraint, StructuralTag) else None
        is_free = request.constraint is None or (held is not None and held.free_text)
        reasoning = FORMATS.get(request.parse_reasoning)
        if request.parse_tool_calls or (reasoning is not None and is_free):
            calls = ToolCallParser(
                TOOL_CALL_FORMATS.get(request.parse_tool_calls),
                in_pieces=held is not None,
                calls_alone=held is not None and not (held.free_text or held.before),
                stray_marks=reasoning.strays if reasoning is not None and is_free else (),
                tools=_tool_schemas(request),
            )
        if reasoning is None:
            return OutputParser(None, calls)
        start = grammar_place(request, vocabulary, prompt_ids).start(vocabulary)
        parser = _reasoning_parser(request, vocabulary, prompt_ids)
        return OutputParser(parser, calls, start, vocabulary.symbols_of)

    @staticmethod
    def bounded(
        request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
    ) -> SamplingParams:
        """The sampling settings of a request, with the tokens around a reasoning that is to be
        bounded.

        Raises:
            RequestError: the bound is less than these tokens, or the reasoning is not parsed.
        """
        sampling = request.sampling
        if sampling.max_reasoning_tokens is None:
            return sampling
        marks = FORMATS.get(request.parse_reasoning)
        if marks is None:
            raise wrong(
                "max_reasoning_tokens",
                "needs a chat whose reasoning is parsed (--reasoning-parser); leave it out",
            )
        parser = _reasoning_parser(request, vocabulary, prompt_ids)
        if parser.has_none:
            return replace(sampling, max_reasoning_tokens=None)
        opening, closing = marks.opening if parser.needs_opening else "", marks.closing
        if request.parse_reasoning == HARMONY:
            opening = marks.opening
            if not request.parse_tool_calls:
                closing += ASSISTANT + FINAL  # a type of the content may follow
        opening_ids, closing_ids = (
            tuple(vocabulary.encode(tag, add_special_tokens=False)) for tag in (opening, closing)
        )
        least = len(opening_ids) + len(closing_ids)
        if sampling.max_reasoning_tokens < least:
            raise wrong(
                "max_reasoning_tokens",
                f"must be at least {least}: the tags around the reasoning count",
            )
        return replace(
            sampling, reasoning_opening_ids=opening_ids, reasoning_closing_ids=closing_ids
        )

    @staticmethod
    def tag_ids(request: GenerateRequest, vocabulary: Vocabulary) -> set[int]:
        """The control tokens that stand for tags. They have to be in the text, so that it can be
        split."""
        tags: set[str] = set()
        if request.parse_tool_calls:
            tags |= TOOL_CALL_FORMATS[request.parse_tool_calls].marks
        if request.parse_reasoning:
            marks = FORMATS[request.parse_reasoning]
            tags |= {marks.opening, *(mark.strip() for mark in marks.strays)}
        if request.parse_reasoning == HARMONY:
            tags.update(MARKS)
        return {i for i, token in vocabulary.special_tokens.items() if token.content in tags}

    def watch(self, text: str, token_id: int | None) -> None:
        """Note a new token and its text: where the tag that closes the reasoning is complete, the
        grammar and the content begin."""
        self._num_characters += len(text)
        if self._messages is not None and token_id is not None:
            if token_id in self._mark_ids:
                self._messages.add_mark(self._num_characters)
            if self._messages.end is None:
                self._ends.append(self._num_characters)
            return
        if self._reasoning is None or token_id is None:
            return
        if self._reasoning.end is None:
            self._ends.append(self._num_characters)
        if self._start is None or self._start.has_begun or self._symbols_of is None:
            return
        self._start.push(self._symbols_of(token_id))
        self._reasoning.opened = self._start.opened
        if self._start.has_begun:
            self._reasoning.reasoning_length = self._num_characters

    def complete(self) -> None:
        """The grammar has ended the answer: it opened no reasoning, even if it is the beginning of
        the tag."""
        if self._reasoning is not None and self._reasoning.opened is None:
            self._reasoning.opened = False

    def split(self, text: str, *, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        """The reasoning, the content and the calls that are now certain.

        Args:
            text: new text, without the end that may be the beginning of a stop string.
            is_last: the answer is complete.
        """
        reasoning = ""
        if self._messages is not None:
            reasoning, content, calls = self._messages.push(text, is_last=is_last)
            return reasoning, content, _joined(calls) if is_last else calls
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if is_last:
                last_reasoning, last_text = self._reasoning.flush()
                reasoning, text = reasoning + last_reasoning, text + last_text
        if self._calls is None:
            return reasoning, text, []
        content, calls = self._calls.push(text)
        if is_last:
            last_content, last_calls = self._calls.flush()
            content, calls = content + last_content, _joined(calls + last_calls)
        return reasoning, content, calls


def _joined(calls: list[ToolCall]) -> list[ToolCall]:
    """Each call's pieces as one."""
    joined: list[ToolCall] = []
    for call in calls:
        if joined and joined[-1].index == call.index:
            call = replace(joined[-1], arguments=joined.pop().arguments + call.arguments)
        joined.append(call)
    return joined


class GrammarPlace(NamedTuple):
    """The fields of :class:`~radixrt.messages.grammars.GrammarUse` that say where a grammar begins;
    without any, at once."""

    begin_after: list[int]
    """The tag that closes the reasoning."""
    opening: list[int]
    """The tag that opens it, if the grammar begins at once without."""
    then_after: list[int]

    def start(self, vocabulary: Vocabulary) -> GrammarStart:
        return GrammarStart(
            *map(vocabulary.tag_symbols, (self.opening, self.begin_after, self.then_after))
        )


AT_ONCE = GrammarPlace([], [], [])


def grammar_place(
    request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
) -> GrammarPlace:
    """The place where the grammar of a request begins in an answer."""
    marks = FORMATS.get(request.parse_reasoning)
    if marks is None or request.constraint is None:
        return AT_ONCE
    if request.parse_reasoning == HARMONY:
        if request.parse_tool_calls:  # the grammar covers the reasoning too
            return AT_ONCE
        begin, then = (vocabulary.encode(m, add_special_tokens=False) for m in (FINAL, MESSAGE))
        return GrammarPlace(begin, [], then)
    parser = _reasoning_parser(request, vocabulary, prompt_ids)
    if parser.has_none:
        return AT_ONCE
    opening, closing = (
        vocabulary.encode(tag, add_special_tokens=False) for tag in (marks.opening, marks.closing)
    )
    return GrammarPlace(closing, opening if parser.is_optional else [], [])


def _harmony_parser(
    request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
) -> OutputParser:
    mark_ids = {i for i, token in vocabulary.special_tokens.items() if token.content in MARKS}
    messages = HarmonyParser(
        vocabulary.decode(prompt_ids[-PROMPT_END_TOKENS:]),
        calls=request.parse_tool_calls == HARMONY,
        in_pieces=request.constraint is not None,
        is_held=request.constraint is not None,
        marks_are_given=len(mark_ids) == len(MARKS),
    )
    return OutputParser(None, None, None, None, messages, frozenset(mark_ids))


def _reasoning_parser(
    request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
) -> ReasoningParser:
    marks = FORMATS[request.parse_reasoning]
    begin = vocabulary.decode(prompt_ids[:PROMPT_BEGIN_TOKENS]) if marks.asked_by else ""
    return ReasoningParser(
        marks,
        vocabulary.decode(prompt_ids[-PROMPT_END_TOKENS:]),
        is_asked=marks.asked_by in begin,
        held=request.constraint is not None,
    )


def _tool_schemas(request: GenerateRequest) -> dict[str, Any]:
    """The schemas of the arguments of the tools that the prompt shows, by name."""
    tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
    functions = [tool["function"] for tool in tools or ()]
    return {function["name"]: function.get("parameters") for function in functions}
