"""Locates each part of a JSON value in its text."""

import dataclasses
import json
import re
from collections.abc import Iterator

from radixrt.constrained.compiler.span_error import Path

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[-+.0-9A-Za-z]+|[{}\[\]:]', re.DOTALL)


@dataclasses.dataclass
class ValuePosition:
    """A value at ``text[start:end]``."""

    start: int
    end: int = -1
    kind: str = ""
    """Its first character."""
    step: str | int = 0
    """Property name or index in the enclosing value."""
    step_start: int = 0
    """Start of the part: of the property's name, after the quote, or of the value itself."""
    parts: "list[ValuePosition]" = dataclasses.field(default_factory=list)

    @property
    def is_container(self) -> bool:
        return self.kind in "{["

    @property
    def content_start(self) -> int:
        """Its first character that is not forced by its type: that after the quote, of a string."""
        return self.start + (self.kind == '"')

    def find(self, path: Path) -> "ValuePosition":
        """The part at a path, or the last one on the way to it that exists."""
        position = self
        for step in path:
            # The last of equal names is the one that a decoder keeps.
            part = next((part for part in reversed(position.parts) if part.step == step), None)
            if part is None:
                break
            position = part
        return position

    def leaves(self) -> "Iterator[ValuePosition]":
        """The scalars in it (itself, if it is one) and empty containers, in order."""
        stack = [self]
        while stack:
            position = stack.pop()
            if position.parts:
                stack.extend(reversed(position.parts))
            else:
                yield position


def locate(text: str, start: int) -> ValuePosition:
    """The parts of the one complete and valid JSON value that begins at ``start``."""
    open_containers: list[ValuePosition] = []
    name: re.Match[str] | None = None
    for token in _TOKEN.finditer(text, start):
        kind = token.group()[0]
        if kind == ":":
            continue
        if kind in "}]":
            value = open_containers.pop()
        elif kind == '"' and name is None and open_containers and open_containers[-1].kind == "{":
            name = token
            continue
        else:
            value = ValuePosition(token.start(), kind=kind)
            _attach(value, open_containers, name)
            name = None
            if value.is_container:
                open_containers.append(value)
                continue
        value.end = token.end()
        if not open_containers:
            return value
    raise ValueError("the value is not complete")


def _attach(
    value: ValuePosition, open_containers: list[ValuePosition], name: re.Match[str] | None
) -> None:
    """Make ``value`` the next part of the innermost container, if there is one."""
    value.step_start = value.start
    if not open_containers:
        return
    value.step = len(open_containers[-1].parts)
    if name is not None:
        value.step, value.step_start = json.loads(name.group()), name.start() + 1
    open_containers[-1].parts.append(value)
