"""Expressions that can be appended to a state: text, calls of the model, messages, and sums of
these."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from radixrt.base.image_parts import data_url
from radixrt.lang.backends.protocol import JsonSchema, Sampling, sampling_of
from radixrt.lang.errors import ProgramError, SourceLine, caller
from radixrt.lang.typed import AnswerType, answer_type

Role = Literal["system", "user", "assistant", "tool"]
SelectMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]


class Expression:
    """Anything that can be appended to a state; ``+`` joins two."""

    def __add__(self, other: "Expression | str") -> "Concatenation":
        return Concatenation((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> "Concatenation":
        return Concatenation((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True)
class Text(Expression):
    text: str


@dataclass(frozen=True)
class Picture(Expression):
    """An image; see :func:`image`."""

    url: str


@dataclass(frozen=True)
class Concatenation(Expression):
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Message(Expression):
    """A message of a conversation."""

    role: Role
    parts: tuple[Expression, ...]
    fields: tuple[tuple[str, str], ...] = ()
    """Further fields of the message, such as ``tool_call_id``."""


@dataclass(frozen=True, eq=False)
class Gen(Expression):
    """A call of the model; see :func:`gen`."""

    name: str | None
    sampling: Sampling
    source: SourceLine
    kind: AnswerType
    n: int = 1
    tools: tuple[Callable[..., Any], ...] = ()
    tool_choice: str | None = None
    stream: bool = False
    stream_values: bool = False
    adapter: str | None = None


@dataclass(frozen=True, eq=False)
class Select(Expression):
    """A choice by likelihood; see :func:`select`."""

    name: str | None
    choices: tuple[str, ...]
    method: SelectMethod
    source: SourceLine
    adapter: str | None = None


@dataclass(frozen=True, eq=False)
class Documents(Expression):
    """Passages whose order the cache decides; see :func:`documents`."""

    name: str | None
    passages: tuple[str, ...]
    separator: str
    max_shift: int | None
    """Most places that a passage may move from its rank."""
    source: SourceLine

    @property
    def is_fixed(self) -> bool:
        """Whether the order is by rank, whatever is cached."""
        return self.max_shift == 0 or len(self.passages) == 1

    def text(self, order: Iterable[int]) -> str:
        return self.separator.join(self.passages[index] for index in order)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    stop: str | Sequence[str] | None = None,
    *,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    min_tokens: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    type: Any = None,
    n: int = 1,
    tools: Sequence[Callable[..., Any]] = (),
    tool_choice: str | None = None,
    stream: bool = False,
    stream_values: bool = False,
    adapter: str | None = None,
    **unknown: NoReturn,
) -> Gen:
    """A call of the model. It starts at once in the background; ``s[name]`` waits for its value.

    Args:
        name: the variable that holds the value.
        max_tokens, temperature, stop, top_p, top_k, min_p, min_tokens, seed: see
            :class:`radixrt.lang.Sampling`. None: the setting of the run or function.
        presence_penalty, frequency_penalty, repetition_penalty: the same.
        regex: constrain the answer to a regular expression.
        schema: constrain the answer to a JSON schema. A dict: the value is the decoded JSON. A
            pydantic model, dataclass, msgspec.Struct or TypedDict: the value is of that type.
        choices: constrain the answer to one of several texts.
        grammar: constrain the answer to an EBNF or Lark grammar.
        type: the Python type of the value: ``int``, ``bool``, ``float``, ``Literal[...]``, an Enum,
            ``list[...]``, or any type for ``schema``.
        n: the number of answers. Above 1, the value is their list, and the state continues with the
            first. An answer that is not of its type is replaced by its
            :class:`radixrt.lang.AnswerError`.
        tools: Python functions that the answer may call. The value is a
            :class:`radixrt.lang.ToolAnswer`; its ``value`` is of the type that was asked for.
        tool_choice: "auto" (default), "required", "none", or the name of the one function to call.
        stream: generate the text in pieces for ``s.text_iter(name)``, also in a program that is not
            streamed.
        stream_values: the values inside the JSON answer can be read by ``s.values_iter(name)`` as
            they are complete. Needs a schema or a type whose JSON is an object or array.
        adapter: the LoRA adapter that answers, by its name on the server. None: its model.
        unknown: not supported; their error lists the known settings.

    Raises:
        ProgramError: two arguments exclude each other, a setting is unknown, or no schema can
            describe the type.

    >>> gen("answer", max_tokens=8, stop=".").sampling.given()
    {'max_tokens': 8, 'stop': '.'}
    """
    if choices is not None:
        choices = _choices("gen", choices)
    if n < 1:
        raise ProgramError(f"gen's n must be at least 1, not {n}.")
    if tool_choice is not None and not tools:
        raise ProgramError("gen's tool_choice needs tools; give them, or leave it out.")
    kind = answer_type(regex=regex, schema=schema, choices=choices, grammar=grammar, type=type)
    if stream_values and (tools or not isinstance(kind.constraint, JsonSchema)):
        raise ProgramError(
            "gen's stream_values needs schema= or a type that is JSON, and no tools: leave it out."
        )
    _check_tool_choice(tool_choice, [getattr(function, "__name__", "") for function in tools])
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "stop": stop, "top_p": top_p, "top_k": top_k,
        "min_p": min_p, "min_tokens": min_tokens, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    return Gen(
        name=name,
        sampling=sampling_of("gen", sampling | unknown),
        source=caller(),
        kind=kind,
        n=n,
        tools=tuple(tools),
        tool_choice=tool_choice,
        stream=stream or stream_values,
        stream_values=stream_values,
        adapter=adapter,
    )


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    method: SelectMethod = "token_length_normalized",
    *,
    adapter: str | None = None,
) -> Select:
    """Chooses the likeliest of several texts. All are scored in one batch; no text is generated.

    Args:
        name: the variable that holds the chosen text.
        choices: the texts.
        method: ``token_length_normalized``: the highest mean log-probability of the tokens.
            ``greedy_token_selection``: the likeliest first token, then the likeliest next one among
            the choices that share it, as greedy decoding chooses.
            ``unconditional_likelihood_normalized``: the highest gain over the same text without the
            prompt, so that common texts have no advantage.
        adapter: the LoRA adapter that scores, by its name on the server. None: its model.

    Raises:
        ProgramError: the choices are empty, or the method is unknown.

    For backends that cannot score: ``gen(choices=...)``.

    >>> select("size", ["small", "large"]).choices
    ('small', 'large')
    """
    methods = SelectMethod.__args__  # type: ignore[attr-defined]
    if method not in methods:
        raise ProgramError(f"select's method must be one of {', '.join(methods)}, not {method!r}.")
    return Select(name, _choices("select", choices), method, caller(), adapter)


def documents(
    passages: Sequence[str],
    order: Literal["rank", "cached"] = "rank",
    *,
    name: str | None = None,
    separator: str = "\n\n",
    max_shift: int | None = None,
) -> Documents:
    """Retrieved passages, one after another.

    Args:
        passages: the texts, the best first.
        order: ``"rank"``: as given. ``"cached"``: first the longest chain of passages that the
            server's KV cache holds behind the text before them, then the others by rank. It is
            found when everything before is computed. Where the backend does not tell what is
            cached, the order is by rank.
        name: the variable that holds the order: the indices of the passages as they stand.
        separator: between two passages.
        max_shift: of ``"cached"``: most places that a passage may move from its rank. None: any
            number.

    Raises:
        ProgramError: there are no passages, one is no text, the order is unknown, or the limit is
            negative.

    >>> documents(["Cats eat mice.", "Dogs bark."], separator=" ").text([1, 0])
    'Dogs bark. Cats eat mice.'
    """
    if isinstance(passages, str) or not passages or not all(isinstance(p, str) for p in passages):
        raise ProgramError("documents needs a list of texts, with at least one.")
    if order not in ("rank", "cached"):
        raise ProgramError(f'documents\'s order must be "rank" or "cached", not {order!r}.')
    if max_shift is not None and max_shift < 0:
        raise ProgramError(f"documents's max_shift must be 0 or more, not {max_shift}.")
    shift = 0 if order == "rank" else max_shift
    return Documents(name, tuple(passages), separator, shift, caller())


def system(content: Expression | str) -> Message:
    """A system message; a ProgramError if it contains a gen, a select or another message."""
    return _message("system", content)


def user(content: Expression | str) -> Message:
    """A user message; a ProgramError if it contains a gen, a select or another message."""
    return _message("user", content)


def assistant(content: Expression | str) -> Message:
    """An assistant message, the place of ``gen`` and ``select`` in a conversation; a ProgramError if
    it contains another message."""
    return _message("assistant", content)


def image(file: str | Path | bytes) -> Picture:
    """An image in a user's message, for a model that sees images: the name of a file, or its
    content. A ProgramError if it can't be read."""
    try:
        return Picture(data_url(file))
    except OSError as error:
        raise ProgramError(f"The image {file!r} can't be read: {error.strerror}.") from error


def parts_of(value: Any) -> tuple[Expression, ...]:
    """The parts of an expression.

    Raises:
        ProgramError: the value is neither text nor an expression.
    """
    match value:
        case Concatenation():
            return value.parts
        case Expression():
            return (value,)
        case str():
            return (Text(value),)
    raise ProgramError(
        f"Only text and expressions can be appended to a state, not {value.__class__.__name__}; write str(...) for "
        "its text."
    )


def _message(role: Role, content: Expression | str) -> Message:
    parts = parts_of(content)
    if any(isinstance(part, Message) for part in parts):
        raise ProgramError(f"A message can't stand inside another: take it out of rl.{role}(...).")
    if role != "assistant" and any(isinstance(part, Gen | Select) for part in parts):
        raise ProgramError(
            f"The model writes only the assistant's messages: move gen or select from rl.{role}(...) to rl.assistant(...)."
        )
    return Message(role, parts)


def _check_tool_choice(tool_choice: str | None, names: Sequence[str]) -> None:
    known = ("auto", "required", "none", *names)
    if tool_choice is not None and tool_choice not in known:
        raise ProgramError(
            f"gen's tool_choice must be one of {', '.join(known)}, not {tool_choice!r}."
        )


def _choices(what: str, choices: Sequence[str]) -> tuple[str, ...]:
    if (
        isinstance(choices, str)
        or not choices
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise ProgramError(
            f"{what}'s choices must be a list of texts, with at least one, none empty."
        )
    if len(set(choices)) < len(choices):
        raise ProgramError(f"{what}'s choices hold a text twice; give each once.")
    return tuple(choices)
