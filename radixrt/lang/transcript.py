"""What has been said so far? Plain text or a conversation, with holes where the model still speaks.

A transcript never changes: appending makes another. So a fork is a copy of one reference, and forks cannot see
each other.
"""

from dataclasses import dataclass, replace
from typing import Any

from radixrt.lang.backends.protocol import Prompt
from radixrt.lang.errors import ProgramError
from radixrt.lang.expressions import Role
from radixrt.lang.hole import Hole

Part = str | Hole


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation."""

    role: Role
    parts: tuple[Part, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()

    def as_message(self) -> dict[str, Any]:
        """In OpenAI's form. All its holes are filled."""
        message: dict[str, Any] = {"role": self.role, "content": text_of(self.parts)}
        fillings = [part.filling for part in self.parts if isinstance(part, Hole)]
        if calls := [call for filling in fillings for call in filling.tool_calls]:
            message["tool_calls"] = calls
        if reasoning := "".join(filling.reasoning for filling in fillings):
            message["reasoning_content"] = reasoning  # templates drop what they do not want
        return message | dict(self.fields)


@dataclass(frozen=True, slots=True)
class Transcript:
    text: tuple[Part, ...] = ()
    """Of a transcript that is plain text."""
    turns: tuple[Turn, ...] = ()
    """Of one that is a conversation."""
    turn_is_open: bool = False
    """The last message goes on with what is appended."""

    def with_part(self, part: Part) -> "Transcript":
        """Append text or a hole, to the open message or to the plain text.

        Raises:
            ProgramError: it has no place in a conversation.
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

    def with_turn(self, turn: Turn) -> "Transcript":
        """Append a message, still open.

        Raises:
            ProgramError: it has no place in plain text.
        """
        if self.text:
            raise ProgramError(
                "This state is plain text, so it can't have messages: put its text into rl.user(...) or rl.system(...) "
                "too, or leave the roles out."
            )
        return replace(self, turns=(*self.turns, turn), turn_is_open=True)

    def closed(self) -> "Transcript":
        """What is appended next is no part of the last message."""
        return replace(self, turn_is_open=False)

    def check_model_may_speak(self) -> None:
        """Raises:
        ProgramError: a gen or select would stand in a message that is not the assistant's.
        """
        if self.turn_is_open and self.turns[-1].role != "assistant":
            raise ProgramError(
                f"The model writes only the assistant's messages: move gen or select from the {self.turns[-1].role} "
                "message to rl.assistant(...)."
            )

    def check_tools_may_be_called(self) -> None:
        """Raises:
        ProgramError: it is plain text, in which no model is told of tools.
        """
        if not self.turns:
            raise ProgramError(
                "Tools need a conversation: put the text before this gen into rl.user(...), and the gen into "
                "rl.assistant(...)."
            )

    def parts(self) -> list[Part]:
        """All of it, in order, without roles."""
        return [*self.text, *(part for turn in self.turns for part in turn.parts)]

    def holes(self) -> list[Hole]:
        return [part for part in self.parts() if isinstance(part, Hole)]

    def messages(self) -> list[dict[str, Any]]:
        """Of a conversation whose holes are all filled."""
        return [turn.as_message() for turn in self.turns]

    def as_prompt(self) -> tuple[Prompt, bool]:
        """What a call answers here, and whether it continues the last message. All holes are filled."""
        if not self.turns:
            return text_of(self.text), False
        messages = self.messages()
        if self.turn_is_open and messages[-1]["content"] == "" and "tool_calls" not in messages[-1]:
            return messages[:-1], False
        return messages, self.turn_is_open


def text_of(parts: tuple[Part, ...]) -> str:
    """Parts whose holes are all filled."""
    return "".join(part if isinstance(part, str) else part.filling.text for part in parts)
