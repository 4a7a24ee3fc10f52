"""What is an answer made of? A thought, content, and calls of tools."""

from collections import deque

from radixrt.constrained import tool_calls
from radixrt.constrained.constraint import StructuralTag
from radixrt.messages.answers import ToolCall
from radixrt.messages.requests import GenerateRequest
from radixrt.tokenizer.answer import reasoning
from radixrt.tokenizer.answer.reasoning import PROMPT_END_TOKENS, ReasoningParser
from radixrt.tokenizer.answer.tool_calls import ToolCallParser
from radixrt.tokenizer.vocabulary import Vocabulary


class AnswerParts:
    """Takes an answer's text apart as it comes, as its request asks."""

    def __init__(
        self,
        thought: ReasoningParser | None,
        calls: ToolCallParser | None,
        closing_ids: list[int],
    ) -> None:
        """
        Args:
            thought: what splits off the thought, if anything does.
            calls: what splits off the calls of tools, if anything does.
            closing_ids: the tokens after which a grammar begins; empty if it does not begin after a thought.
        """
        self._thought = thought
        self._calls = calls
        self._closing_ids = closing_ids
        self._last_ids: deque[int] = deque(maxlen=len(closing_ids))
        self._num_characters = 0

    @staticmethod
    def of(
        request: GenerateRequest, vocabulary: Vocabulary, prompt_ids: list[int]
    ) -> "AnswerParts":
        calls = None
        if request.parse_tool_calls:
            held = request.constraint if isinstance(request.constraint, StructuralTag) else None
            calls = ToolCallParser(
                tool_calls.FORMATS[request.parse_tool_calls],
                in_pieces=request.stream and held is not None,
                calls_alone=held is not None and not held.free_text,
            )
        if not request.parse_reasoning:
            return AnswerParts(None, calls, [])
        marks = reasoning.FORMATS[request.parse_reasoning]
        prompt_end = vocabulary.decode(prompt_ids[-PROMPT_END_TOKENS:])
        is_held = request.constraint is not None
        closing_ids = vocabulary.encode(marks.closing, add_special_tokens=False) if is_held else []
        return AnswerParts(ReasoningParser(marks, prompt_end, held=is_held), calls, closing_ids)

    @staticmethod
    def tag_ids(request: GenerateRequest, vocabulary: Vocabulary) -> set[int]:
        """The control tokens that stand for tags, and have to be in the text for it to be taken apart."""
        tags: set[str] = set()
        if request.parse_tool_calls:
            written = tool_calls.FORMATS[request.parse_tool_calls]
            tags |= {written.opening, written.closing}
        if request.parse_reasoning:
            marks = reasoning.FORMATS[request.parse_reasoning]
            tags |= {marks.opening, marks.closing}
        return {i for i, token in vocabulary.special_tokens.items() if token.content in tags}

    def watch(self, text: str, token_id: int | None) -> None:
        """Take note of a new token, and of the text that came with it: where the tokens that close a thought are
        complete a grammar begins, and the content with it."""
        self._num_characters += len(text)
        if self._thought is None or token_id is None or not self._closing_ids:
            return
        self._last_ids.append(token_id)
        if list(self._last_ids) == self._closing_ids and self._thought.thought_length is None:
            self._thought.thought_length = self._num_characters

    def split(self, text: str, *, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        """The thought, the content and the calls that are now certain.

        Args:
            text: what is new, without what may be a stop string.
            is_last: there will be no more.
        """
        thought = ""
        if self._thought is not None:
            thought, text = self._thought.push(text)
            if is_last:
                last_thought, last_text = self._thought.flush()
                thought, text = thought + last_thought, text + last_text
        if self._calls is None:
            return thought, text, []
        content, calls = self._calls.push(text)
        if is_last:
            last_content, last_calls = self._calls.flush()
            content, calls = content + last_content, calls + last_calls
        return thought, content, calls
