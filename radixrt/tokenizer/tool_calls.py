"""Where does an answer call a tool? Read from the text of models that write calls as Hermes and Qwen do:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

import json

from radixrt.messages import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Splits an answer's text into content and tool calls, as it comes.

    A call is given out when it is complete. What looks like a call and is none stays content.
    """

    def __init__(self) -> None:
        self._undecided = ""
        """What may be the beginning of a tag; inside a call, all of it so far."""
        self._inside = False
        self._gap: str | None = None
        """White space since the last call: no content unless content follows."""
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are now certain."""
        self._undecided += text
        content, calls = "", []
        while True:
            before, tag, after = self._undecided.partition(_CLOSE if self._inside else _OPEN)
            if not tag:
                break
            self._undecided = after
            if not self._inside:
                content += self._content(before)
            elif call := self._parse(before):
                calls.append(call)
            else:
                content += self._content(_OPEN + before + _CLOSE)
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._undecided) - _length_of_begun_tag(self._undecided)
            content += self._content(self._undecided[:certain])
            self._undecided = self._undecided[certain:]
        return content, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest, once the answer is complete: models often leave the last closing tag out."""
        rest, self._undecided = self._undecided, ""
        if not self._inside:
            return self._content(rest), []
        self._inside = False
        call = self._parse(rest)
        return ("", [call]) if call else (self._content(_OPEN + rest), [])

    def _parse(self, text: str) -> ToolCall | None:
        try:
            call = json.loads(text)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False, allow_nan=False)
            (call["name"] + arguments).encode()
        except (
            ValueError,
            RecursionError,
        ):  # no JSON, or JSON of what is no number, text or sane depth
            return None
        self._num_calls += 1
        self._gap = ""
        return ToolCall(index=self._num_calls - 1, name=call["name"], arguments=arguments)

    def _content(self, text: str) -> str:
        if self._gap is None:
            return text
        self._gap += text
        if not self._gap.strip():
            return ""
        text, self._gap = self._gap, None
        return text


def _length_of_begun_tag(text: str) -> int:
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)
