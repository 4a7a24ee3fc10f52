"""Splits the reasoning before an answer off its content."""

import dataclasses

from radixrt.parsers.marks import ModelMarks
from radixrt.parsers.scanner import length_of_begun

PROMPT_END_TOKENS = 32
"""More than a template writes after an opening or a closing tag."""
PROMPT_BEGIN_TOKENS = 512
"""More than a template's own system prompt has."""


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning."""

    opening: str
    closing: str
    begins_inside: bool
    """The answer begins with the reasoning, with or without the opening tag."""
    families: tuple[str, ...] = ()
    """Marks in the chat template of models that write so; without: of all other models whose
    template has one of the tags."""
    answer_marks: tuple[str, ...] = ()
    """Around the content; they are dropped from it, unless a grammar governs it."""
    label: str = ""
    """A word behind the opening tag that is not a part of the reasoning."""
    asked_by: str = ""
    """The beginning of a prompt has this text if the model is to reason; "": it may always."""

    @property
    def strays(self) -> tuple[str, ...]:
        """Texts that are dropped from the content: a closing tag alone, an opening with its label,
        marks around the answer."""
        labelled = (f"{self.opening}{self.label}\n",) if self.label else ()
        return self.closing, *labelled, *self.answer_marks

    def recognises(self, marks: ModelMarks) -> bool:
        """Whether the chat template is of a model that writes so."""
        if not (marks.in_template(self.opening) or marks.in_template(self.closing)):
            return False
        if self.families:
            return any(map(marks.in_template, self.families))
        return not any(
            other.closing == self.closing and other.recognises(marks)
            for other in FORMATS.values()
            if other.families
        )


FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(
        "<think>", "</think>", begins_inside=True, families=("<\uff5cAssistant\uff5c>",)
    ),
    "qwen3": ReasoningFormat("<think>", "</think>", begins_inside=False),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", begins_inside=False),
    "hunyuan": ReasoningFormat(
        "<think>",
        "</think>",
        begins_inside=False,
        families=("<\uff5chy_Assistant\uff5c>", "<|extra_0|>"),
        answer_marks=("<answer>\n", "\n</answer>"),
    ),
    "ernie45": ReasoningFormat(
        "<think>",
        "</think>",
        begins_inside=True,
        families=("<response>\\n", "<response>\n"),
        answer_marks=("<response>\n", "\n</response>"),
    ),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        begins_inside=False,
        asked_by="Write your thoughts",
    ),
    "granite33": ReasoningFormat(
        "<think>",
        "</think>",
        begins_inside=False,
        families=("<response></response>",),
        answer_marks=("<response>", "</response>"),
        asked_by="Write your thoughts",
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", begins_inside=False),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        begins_inside=False,
        families=("<|channel|>analysis<|message|>",),
    ),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", begins_inside=False, label="thought"),
}
"""Formats by the name that ``--reasoning-parser`` gives them."""


class ReasoningParser:
    """Splits an answer's text into reasoning and content while it is generated.

    Tags belong to neither; white space around the reasoning is dropped.

    >>> parser = ReasoningParser(FORMATS["qwen3"])
    >>> parser.push("<think>Two and two</think> 4")
    ('Two and two', '4')

    Args:
        written: the tags of this model.
        prompt_end: the last characters of the prompt, which may hold an opening or a closing tag.
        is_asked: the prompt lets the model reason.
        held: a grammar governs the content. The reasoning then ends where the grammar begins, at
            ``reasoning_length``, which the caller sets as soon as it is known, and the content is
            not trimmed. A held answer that may open its reasoning begins with the opening tag, or
            has none. The caller says so in ``opened``.

    Attributes:
        opened: the answer begins with the opening tag; None: not known. Only if ``is_optional``.
        reasoning_length: length in characters of the reasoning with its tags; None: not known. Only
            if ``held``.
        end: that length, once the reasoning has ended; 0: there is none.
    """

    def __init__(
        self,
        written: ReasoningFormat,
        prompt_end: str = "",
        *,
        is_asked: bool = True,
        held: bool = False,
    ) -> None:
        self._written = written
        self._held = held
        self.reasoning_length: int | None = None
        self.end: int | None = None
        self._undecided = ""
        self._num_decided = 0
        end = prompt_end.rstrip()
        labelled = bool(written.label) and end.endswith(written.opening + written.label)
        self._label = "" if labelled else written.label
        is_decided = labelled or end.endswith((written.opening, written.closing))
        self._may_open = is_asked and not is_decided
        self._inside = written.begins_inside or labelled or end.endswith(written.opening)
        if end.endswith(written.closing):
            self._inside = False
        self.is_optional = held and self._may_open and not self._inside
        """The grammar begins at once unless the answer begins with the opening tag."""
        self.opened: bool | None = None
        self._trims_reasoning = True
        self._trims_content = False

    @property
    def has_none(self) -> bool:
        """The prompt has closed the reasoning; before any text."""
        return not self._may_open and not self._inside

    @property
    def needs_opening(self) -> bool:
        """There is reasoning only if the answer opens it; before any text."""
        return self._may_open and not self._inside

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are now certain."""
        self._undecided += text
        if self._may_open and not self._take_opening():
            return "", ""
        if not self._inside:
            self.end = self.end or 0
            return "", self._trimmed_content(self._take(len(self._undecided)))
        if not self._take_label():
            return "", ""
        end = self._reasoning_end()
        if end is None:
            return self._trimmed_reasoning(self._take(self._num_certain())), ""
        reasoning = self._take(end).rstrip().removesuffix(self._written.closing).rstrip()
        self._inside, self._trims_content = False, not self._held
        self.end = self._num_decided
        return self._trimmed_reasoning(reasoning), self._trimmed_content(
            self._take(len(self._undecided))
        )

    def flush(self) -> tuple[str, str]:
        """The rest, once the answer is complete. Reasoning without a closing tag stays
        reasoning."""
        rest = self._take(len(self._undecided))
        if self._inside or (self._may_open and self._held):
            return self._trimmed_reasoning(rest.rstrip()), ""
        self.end = self.end or 0
        return "", self._trimmed_content(rest)

    def _take_opening(self) -> bool:
        """Take the opening tag, if there is one. False: more text is needed to decide."""
        begun, tag = self._undecided.lstrip(), self._written.opening
        if self.is_optional and not self.opened:
            self._may_open = self.opened is None
            return self.opened is False
        if len(begun) < len(tag) and tag.startswith(begun):
            return False
        self._may_open = False
        if begun.startswith(tag):
            self._inside = True
            self._take(len(self._undecided) - len(begun) + len(tag))
        return True

    def _take_label(self) -> bool:
        """Take the label behind the opening tag, if there is one. False: more text is needed to
        decide."""
        label = self._label
        if len(self._undecided) < len(label) and label.startswith(self._undecided):
            return False
        self._label = ""
        if self._undecided.startswith(label):
            self._take(len(label))
        return True

    def _reasoning_end(self) -> int | None:
        """The place in the undecided text where the reasoning and its tag end."""
        if self._held:
            if self.reasoning_length is None:
                return None
            end = max(self.reasoning_length - self._num_decided, 0)
            return None if end > len(self._undecided) else end
        found = self._undecided.find(self._written.closing)
        return None if found < 0 else found + len(self._written.closing)

    def _num_certain(self) -> int:
        """Number of characters of the undecided text that are reasoning for any continuation."""
        text = self._undecided.removesuffix(self._written.closing)
        text = text[: len(text) - length_of_begun(self._written.closing, text)]
        return len(text.rstrip())

    def _take(self, length: int) -> str:
        taken, self._undecided = self._undecided[:length], self._undecided[length:]
        self._num_decided += length
        return taken

    def _trimmed_reasoning(self, text: str) -> str:
        if self._trims_reasoning:
            text = text.lstrip()
            self._trims_reasoning = not text
        return text

    def _trimmed_content(self, text: str) -> str:
        if self._trims_content:
            text = text.lstrip()
            self._trims_content = not text
        return text
