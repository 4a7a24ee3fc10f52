"""The protocol of backends: typed calls, constraints and answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from radixrt.lang.errors import ProgramError

Messages = Sequence[dict[str, Any]]
"""A conversation in OpenAI's form."""
Prompt = str | Messages

DEFAULT_MAX_TOKENS = 128
"""Limit in plain text, where most models do not stop by themselves."""


@dataclass(frozen=True)
class JsonSchema:
    """The answer is JSON that satisfies a schema."""

    schema: dict[str, Any]
    name: str = "answer"


@dataclass(frozen=True)
class Regex:
    """The answer matches a regular expression."""

    pattern: str


@dataclass(frozen=True)
class Choices:
    """The answer is one of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Grammar:
    """The answer is a sentence of an EBNF or Lark grammar."""

    text: str


Constraint = JsonSchema | Regex | Choices | Grammar


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. None: the run's setting applies, then the function's, then the server's
    default.

    >>> Sampling(temperature=0).over(Sampling(temperature=1.0, max_tokens=8)).given()
    {'max_tokens': 8, 'temperature': 0}
    """

    max_tokens: int | None = None
    """Most tokens of an answer. Default: 128 in plain text, in a conversation the rest of the
    context."""
    min_tokens: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    """The answer ends before the first of these texts."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))

    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: "Sampling") -> "Sampling":
        """These settings, and the other's where these are None."""
        return Sampling(**(other.given() | self.given()))


def sampling_of(what: str, settings: dict[str, Any]) -> Sampling:
    """Settings from keyword arguments.

    Args:
        what: the called function's name, for errors.

    Raises:
        ProgramError: a setting is unknown.
    """
    unknown = sorted(settings.keys() - Sampling.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise ProgramError(
            f"{what} has no setting {', '.join(unknown)}; its sampling settings are {known}."
        )
    return Sampling(**settings)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model."""

    prompt: Prompt
    continues: bool = False
    """The answer continues the conversation's last message, which is the assistant's."""
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    """Tools in OpenAI's form."""
    tool_choice: str | None = None
    stream: bool = False
    """Send the answer in pieces. A whole answer costs less."""
    stream_values: bool = False
    """Tell of the values of the JSON answer as they are complete; the call streams."""
    next_use_s: float | None = None
    """Seconds until the program expects to continue from here: a hint for the KV cache."""
    adapter: str | None = None
    """The LoRA adapter that answers, by its name on the server; None: the backend's model."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the server's KV cache."""
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """The server's times of one call, in seconds."""

    queued_s: float
    """Time from arrival to the first planned step."""
    prefill_s: float
    """Time from the first planned step to the first token."""
    total_s: float
    """Time from arrival to the last token."""


@dataclass(frozen=True, kw_only=True)
class ToolCallPiece:
    """A piece of a tool call; only the first piece of each call has an id and a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class PartialValue:
    """A value inside an answer that is still being generated. It is complete, and satisfies its
    schema."""

    pointer: str
    """JSON pointer of the value in the answer; "" for the whole."""
    value: Any
    """A value of the type that the gen's type has there; plain JSON where it names none."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a call's answers."""

    index: int = 0
    """The index of the answer, from 0 to n - 1."""
    text: str = ""
    reasoning: str = ""
    """The model's reasoning before the answer, where the backend separates it."""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    values: tuple[PartialValue, ...] = ()
    """Values of the text that are complete now, as plain JSON."""
    finish_reason: str | None = None
    usage: Usage | None = None
    """Usage, in the last piece of a call, if the backend reports it."""
    times: ServerTimes | None = None
    """Times of the first answer, in its last piece, if the backend reports them."""


@dataclass(frozen=True, kw_only=True)
class ChoiceCall:
    """Asks for the likelihood of several continuations of one prompt."""

    prompt: Prompt
    continues: bool = False
    """The texts continue the conversation's last message, which is the assistant's."""
    choices: tuple[str, ...]
    unconditional: bool = False
    """Also score the texts without the prompt."""
    next_use_s: float | None = None
    """As in :class:`Call`."""
    adapter: str | None = None
    """As in :class:`Call`."""


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a continuation's tokens."""

    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = field(default=())
    """Scores without the prompt, if requested."""


@dataclass(frozen=True)
class Scored:
    """The answer to a :class:`ChoiceCall`."""

    scores: list[Score]
    """One for each choice, in order."""
    usage: Usage = field(default_factory=Usage)
    """The prompt counts once; the choices' tokens count as completion."""


@dataclass(frozen=True, kw_only=True)
class CachedPrompt:
    """How much of a prompt is in the KV cache now."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Leading tokens, in whole pages."""


class Backend(Protocol):
    """Answers the calls of programs. All coroutines run in the runtime's one event loop."""

    name: str
    """For errors."""

    def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Execute a call. Closing the generator cancels the call on the server.

        Raises:
            BackendError: or a subclass.
        """
        ...

    async def score(self, call: ChoiceCall) -> Scored:
        """Score continuations of a prompt in one batch.

        Raises:
            BackendError: or a subclass; UnsupportedFeature if the backend cannot score.
        """
        ...

    async def cache_tokens(self) -> int | None:
        """The capacity of the KV cache in tokens; None: unknown. Never raises."""
        return None

    async def compute_ahead(self, prompt: Prompt) -> None:
        """Compute a prompt in idle time, where the backend can. Never raises."""

    async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
        """How much of each prompt is cached now; nothing is computed. None: unknown. Never
        raises."""
        return None
