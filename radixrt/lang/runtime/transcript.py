"""The immutable text or conversation of a state, with placeholders for answers that are still being
generated.

Appending makes a new transcript. So a fork copies one reference, and forks cannot see each other.
"""

from dataclasses import dataclass, replace
from typing import Any

from radixrt.lang.backends.protocol import Prompt
from radixrt.lang.errors import ProgramError
from radixrt.lang.expressions import Picture, Role
from radixrt.lang.runtime.placeholder import Placeholder

Part = str | Placeholder | Picture


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation."""

    role: Role
    parts: tuple[Part, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()

    def as_message(self) -> dict[str, Any]:
        """The turn in OpenAI's form. All its placeholders are filled."""
        content: Any = text_of(self.parts)
        if any(isinstance(part, Picture) for part in self.parts):
            content = [_content_part(part) for part in self.parts]
        message: dict[str, Any] = {"role": self.role, "content": content}
        completions = [part.completion for part in self.parts if isinstance(part, Placeholder)]
        if calls := [call for completion in completions for call in completion.tool_calls]:
            message["tool_calls"] = calls
        if reasoning := "".join(completion.reasoning for completion in completions):
            message["reasoning_content"] = reasoning  # templates drop it where it is not wanted
        return message | dict(self.fields)


@dataclass(frozen=True, slots=True)
class Transcript:
    """Either plain text or a conversation."""

    text: tuple[Part, ...] = ()
    """Parts of plain text."""
    turns: tuple[Turn, ...] = ()
    """Turns of a conversation."""
    turn_is_open: bool = False
    """The next part belongs to the last message."""

    def with_part(self, part: Part) -> "Transcript":
        """Append text or a placeholder, to the open message or to the plain text.

        Raises:
            ProgramError: the transcript is a conversation without an open message.
        """
        if self.turn_is_open:
            *before, last = self.turns
            return replace(self, turns=(*before, replace(last, parts=(*last.parts, part))))
        if self.turns:
            raise ProgramError(
                "This state is a conversation, so everything in it is part of a message: put text into rl.user(...) or "
                "rl.system(...), and gen or select into rl.assistant(...)."
            )
        return replace(self, text=(*self.text, part))

    def with_picture(self, picture: Picture) -> "Transcript":
        """Append an image to the open message.

        Raises:
            ProgramError: it is not a user's.
        """
        if not self.turn_is_open or self.turns[-1].role != "user":
            raise ProgramError("An image stands in a user's message: put it into rl.user(...).")
        return self.with_part(picture)

    def with_turn(self, turn: Turn) -> "Transcript":
        """Append a message, still open.

        Raises:
            ProgramError: the transcript is plain text.
        """
        if self.text:
            raise ProgramError(
                "This state is plain text, so it can't have messages: put its text into rl.user(...) or rl.system(...) "
                "too, or leave the roles out."
            )
        return replace(self, turns=(*self.turns, turn), turn_is_open=True)

    def closed(self) -> "Transcript":
        """The same, without an open message."""
        return replace(self, turn_is_open=False)

    def check_model_may_speak(self) -> None:
        """Raises ProgramError if a gen or select would stand in a message that is not the
        assistant's."""
        if self.turn_is_open and self.turns[-1].role != "assistant":
            raise ProgramError(
                f"The model writes only the assistant's messages: move gen or select from the {self.turns[-1].role} "
                "message to rl.assistant(...)."
            )

    def check_tools_may_be_called(self) -> None:
        """Raises ProgramError if the transcript is plain text, which has no place for tools."""
        if not self.turns:
            raise ProgramError(
                "Tools need a conversation: put the text before this gen into rl.user(...), and the gen into "
                "rl.assistant(...)."
            )

    def parts(self) -> list[Part]:
        """All parts in order, without roles."""
        return [*self.text, *(part for turn in self.turns for part in turn.parts)]

    def placeholders(self) -> list[Placeholder]:
        return [part for part in self.parts() if isinstance(part, Placeholder)]

    def messages(self) -> list[dict[str, Any]]:
        """The messages of a conversation whose placeholders are all filled."""
        return [turn.as_message() for turn in self.turns]

    def as_prompt(self) -> tuple[Prompt, bool]:
        """The prompt of a call at this place, and whether the call continues the last message. All
        placeholders are filled."""
        if not self.turns:
            return text_of(self.text), False
        messages = self.messages()
        if self.turn_is_open and messages[-1]["content"] == "" and "tool_calls" not in messages[-1]:
            return messages[:-1], False
        return messages, self.turn_is_open


def text_of(parts: tuple[Part, ...]) -> str:
    """The text of parts whose placeholders are all filled; of an image, its mark."""
    return "".join(map(_text_of, parts))


def _text_of(part: Part) -> str:
    if isinstance(part, Picture):
        return "[image]"
    return part if isinstance(part, str) else part.completion.text


def _content_part(part: Part) -> dict[str, Any]:
    """A part in OpenAI's form."""
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": _text_of(part)}
