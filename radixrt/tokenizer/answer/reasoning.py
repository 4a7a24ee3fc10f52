"""Which part of an answer is the thought before it?"""

import dataclasses

from radixrt.tokenizer.answer.tool_calls import length_of_begun

PROMPT_END_TOKENS = 32
"""More than a template writes after an opening or a closing tag."""


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thought."""

    opening: str
    closing: str
    begins_inside: bool
    """The answer begins with the thought, whether or not it writes the opening tag."""


FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "qwen3": ReasoningFormat("<think>", "</think>", begins_inside=False),
}
"""By the name that ``--reasoning-parser`` gives them."""


class ReasoningParser:
    """Splits an answer's text into thought and content, as it comes.

    Tags belong to neither; white space around a thought is dropped.

    Args:
        written: how this model marks its thought.
        prompt_end: the last characters of the prompt, which may have opened the thought, or closed it.
        held: what follows the thought is held to a grammar: the thought then ends where the grammar begins, at
            ``thought_length``, which is told as soon as it is known, and the content is left as it is.

    Attributes:
        thought_length: length in characters of the thought with its tags; None: not known. Only if ``held``.
    """

    def __init__(
        self, written: ReasoningFormat, prompt_end: str = "", *, held: bool = False
    ) -> None:
        self._written = written
        self._held = held
        self.thought_length: int | None = None
        self._undecided = ""
        self._num_decided = 0
        end = prompt_end.rstrip()
        self._may_open = not end.endswith((written.opening, written.closing))
        self._inside = written.begins_inside or end.endswith(written.opening)
        if end.endswith(written.closing):
            self._inside = False
        self._trims_thought = True
        self._trims_content = False

    def push(self, text: str) -> tuple[str, str]:
        """Return the thought and the content that are now certain."""
        self._undecided += text
        if self._may_open and not self._take_opening():
            return "", ""
        if not self._inside:
            return "", self._content(self._take(len(self._undecided)))
        end = self._thought_end()
        if end is None:
            return self._thought(self._take(self._num_certain())), ""
        thought = self._take(end).rstrip().removesuffix(self._written.closing).rstrip()
        self._inside, self._trims_content = False, not self._held
        return self._thought(thought), self._content(self._take(len(self._undecided)))

    def flush(self) -> tuple[str, str]:
        """The rest, once the answer is complete. A thought that was never closed stays one."""
        rest = self._take(len(self._undecided))
        if self._inside or (self._may_open and self._held):
            return self._thought(rest.rstrip()), ""
        return "", self._content(rest)

    def _take_opening(self) -> bool:
        """Whether it is decided if the answer begins with an opening tag; takes it if so."""
        begun, tag = self._undecided.lstrip(), self._written.opening
        if len(begun) < len(tag) and tag.startswith(begun):
            return False
        self._may_open = False
        if begun.startswith(tag):
            self._inside = True
            self._take(len(self._undecided) - len(begun) + len(tag))
        elif self._held:
            self._inside = True  # a thought without a tag: the grammar has not begun
        return True

    def _thought_end(self) -> int | None:
        """Where in what is undecided the thought and its tag end."""
        if self._held:
            if self.thought_length is None:
                return None
            end = max(self.thought_length - self._num_decided, 0)
            return None if end > len(self._undecided) else end
        found = self._undecided.find(self._written.closing)
        return None if found < 0 else found + len(self._written.closing)

    def _num_certain(self) -> int:
        """How much of what is undecided is thought, whatever comes."""
        text = self._undecided.removesuffix(self._written.closing)
        text = text[: len(text) - length_of_begun(self._written.closing, text)]
        return len(text.rstrip())

    def _take(self, length: int) -> str:
        taken, self._undecided = self._undecided[:length], self._undecided[length:]
        self._num_decided += length
        return taken

    def _thought(self, text: str) -> str:
        if self._trims_thought:
            text = text.lstrip()
            self._trims_thought = not text
        return text

    def _content(self, text: str) -> str:
        if self._trims_content:
            text = text.lstrip()
            self._trims_content = not text
        return text
