"""What must something offer to answer a program's calls? One small protocol, and its typed calls and answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from radixrt.lang.constraints import Constraint
from radixrt.lang.sampling import Sampling

Messages = Sequence[dict[str, Any]]
"""A conversation in OpenAI's form."""
Prompt = str | Messages

DEFAULT_MAX_TOKENS = 128
"""In plain text, where most models find no end by themselves."""


@dataclass(frozen=True, kw_only=True)
class CacheHints:
    """What the program knows of its own future. Advice: a backend may ignore all of it."""

    session: str = ""
    """The run of a program that the call belongs to."""
    next_use_s: float | None = None
    """Seconds until the program expects to go on from here."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a model."""

    prompt: Prompt
    continues: bool = False
    """The answer continues the conversation's last message, which is the assistant's."""
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form."""
    tool_choice: str | None = None
    stream: bool = False
    """Someone reads along. Else the answer may come as a whole, which costs less."""
    hints: CacheHints = field(default_factory=CacheHints)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt: found in the server's KV cache."""
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """Where the time of one call went on the other side, in seconds."""

    queued_s: float
    """From its arrival to its first planned work."""
    prefill_s: float
    """From there to the first token."""
    total_s: float
    """From its arrival to its last token."""


@dataclass(frozen=True, kw_only=True)
class ToolCallPiece:
    """A piece of a call that the answer makes; only the first of each has an id and a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What came of a call at one moment."""

    index: int = 0
    """Of which of the n answers."""
    text: str = ""
    reasoning: str = ""
    """What the model thinks before it answers, where the backend tells it apart."""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    """In the last piece of a call, where the backend tells."""
    times: ServerTimes | None = None
    """Of the first answer, with its last piece, where the backend tells."""


@dataclass(frozen=True, kw_only=True)
class ChoiceCall:
    """How likely is each of several texts behind one prompt?"""

    prompt: Prompt
    continues: bool = False
    """The texts continue the conversation's last message, which is the assistant's."""
    choices: tuple[str, ...]
    unconditional: bool = False
    """Score them without the prompt, too."""
    hints: CacheHints = field(default_factory=CacheHints)


@dataclass(frozen=True)
class Score:
    """How likely a continuation is, token by token."""

    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = field(default=())
    """The same without the prompt, where it was asked for."""


@dataclass(frozen=True)
class Scored:
    """The answer to a :class:`ChoiceCall`."""

    scores: list[Score]
    """One for each choice, in their order."""
    usage: Usage = field(default_factory=Usage)
    """The prompt counts once, and each choice's tokens as completion."""


class Backend(Protocol):
    """Its coroutines all run in one event loop: the runtime's. Who derives from it, need not care for the cache."""

    name: str
    """For errors."""

    def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Run a call. Closing the generator ends the call on the other side, too.

        Raises:
            BackendError: one of its family.
        """
        ...

    async def score(self, call: ChoiceCall) -> Scored:
        """Score continuations of a prompt, in one batch.

        Raises:
            BackendError: one of its family; UnsupportedFeature, where it can't.
        """
        ...

    async def cache_tokens(self) -> int | None:
        """What the KV cache can hold, if that is known. Never raises."""
        return None

    async def programs_ended(self, sessions: Sequence[str]) -> None:
        """What these runs alone have left in the KV cache is not needed any more. Advice: never raises."""

    async def pin(self, prefix: Prompt, seconds: float) -> str | None:
        """Keep a prefix's KV for so long; returns what :meth:`unpin` takes, or None: it can't be kept. Never raises."""
        return None

    async def unpin(self, lease: str) -> None:
        """Let go of it. Never raises."""
