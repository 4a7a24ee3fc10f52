"""What has come of one answer so far? Its text and its calls of tools, put together from pieces."""

from dataclasses import dataclass, field
from typing import Any

from radixrt.lang.backends.protocol import Piece, ToolCallPiece


@dataclass
class Answer:
    """One of a call's answers."""

    text: str = ""
    reasoning: str = ""
    """What the model thought before it."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form."""
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.finish_reason = piece.finish_reason or self.finish_reason
        for call in piece.tool_calls:
            self._add_call(call)

    def _add_call(self, piece: ToolCallPiece) -> None:
        while len(self.tool_calls) <= piece.index:
            function = {"name": "", "arguments": ""}
            self.tool_calls.append({"id": "", "type": "function", "function": function})
        call = self.tool_calls[piece.index]
        call["id"] = piece.id or call["id"]
        call["function"]["name"] += piece.name
        call["function"]["arguments"] += piece.arguments
