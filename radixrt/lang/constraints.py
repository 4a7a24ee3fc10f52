"""What can an answer be held to? One of four, in the words of no particular server."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonSchema:
    """JSON that satisfies a schema."""

    schema: dict[str, Any]
    name: str = "answer"


@dataclass(frozen=True)
class Regex:
    pattern: str


@dataclass(frozen=True)
class Choices:
    """One of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Grammar:
    """EBNF or Lark."""

    text: str


Constraint = JsonSchema | Regex | Choices | Grammar

FEATURE_NAMES: dict[type, str] = {
    JsonSchema: "JSON schemas",
    Regex: "regular expressions (gen's regex=)",
    Choices: "choices (gen's choices=, Literal and Enum types)",
    Grammar: "grammars (gen's grammar=)",
}
"""What errors call each kind."""
