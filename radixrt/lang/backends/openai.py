"""Backend for any OpenAI-compatible server. It sends standard fields only and refuses features that
need others."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.openai_format import (
    STANDARD_SAMPLING,
    path_of,
    pieces_of,
    standard_body,
)
from radixrt.lang.backends.protocol import (
    Backend,
    Call,
    ChoiceCall,
    Choices,
    Grammar,
    JsonSchema,
    Piece,
    Prompt,
    Regex,
    Score,
    Scored,
)
from radixrt.lang.errors import BadRequest, UnsupportedFeature

FEATURE_NAMES: dict[type, str] = {
    JsonSchema: "JSON schemas",
    Regex: "regular expressions (gen's regex=)",
    Choices: "choices (gen's choices=, Literal and Enum types)",
    Grammar: "grammars (gen's grammar=)",
}
"""Names of constraints in errors."""
CHOICE_PROPERTY = "choice"
"""Choices are sent as the one property of a JSON object: strict mode takes no other JSON at the
root."""


class OpenAI(Backend):
    """A server with OpenAI's API.

    Args:
        base_url: the address, with or without ``/v1``.
        api_key: sent as a bearer token.
        model: the model's name.
    """

    def __init__(
        self, base_url: str = "https://api.openai.com/v1", api_key: str = "none", *, model: str
    ) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.name = f"The OpenAI-compatible server at {self.url}"
        self._http = HttpClient(self.url, api_key, "Check base_url, and whether the server runs.")

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        self._refuse_unsupported(call)
        choices = call.constraint if isinstance(call.constraint, Choices) else None
        if choices is not None:
            call = _with_schema(call, choices)
        body = standard_body(call, call.adapter or self.model)
        if "messages" in body:
            body["messages"] = without_old_reasoning(call.prompt)
        async with aclosing(self._http.answer(path_of(call), body)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    yield piece if choices is None else _without_object(piece)

    async def score(self, call: ChoiceCall) -> Scored:
        """Let the server echo the prompt and each choice with log-probabilities, which only
        completions offer."""
        prompt = call.prompt
        if not isinstance(prompt, str):
            raise self._unsupported(
                "log-probabilities of a conversation's tokens, which select needs",
                "Let the model write one of them, rl.gen(choices=[...]), or write the program as plain text without roles.",
            )
        if not prompt:
            raise self._unsupported("select at the very beginning of a text", "Put text before it.")
        befores = [prompt, "\n"] if call.unconditional else [prompt]
        asked = [(before + choice, len(before)) for before in befores for choice in call.choices]
        model = call.adapter or self.model
        found = await self._echoed(
            model, [text for text, _ in asked], [start for _, start in asked]
        )
        without = found[len(call.choices) :] or [()] * len(call.choices)
        return Scored([Score(*pair) for pair in zip(found, without, strict=False)])

    async def _echoed(
        self, model: str, texts: list[str], starts: list[int]
    ) -> list[tuple[float, ...]]:
        """The log-probabilities of each text's tokens that end after its start, in one batch."""
        body = {
            "model": model, "prompt": texts, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0,
        }  # fmt: skip
        try:
            answer = await self._http.request("POST", "/v1/completions", body)
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            echoed = [choice["logprobs"] for choice in choices]
            return [
                _beyond(start, logprobs) for start, logprobs in zip(starts, echoed, strict=True)
            ]
        except (BadRequest, KeyError, TypeError, ValueError) as error:
            raise self._unsupported(
                f"echoed log-probabilities of completions, which select needs ({error})",
                "Use rl.gen(choices=[...]) in a conversation instead.",
            ) from error

    def _refuse_unsupported(self, call: Call) -> None:
        """Raises UnsupportedFeature if the call needs a field that is not standard."""
        if call.constraint is not None and not isinstance(call.constraint, JsonSchema | Choices):
            raise self._unsupported(
                FEATURE_NAMES[type(call.constraint)], "Use gen's schema=, or a radixrt server."
            )
        if isinstance(call.prompt, str) and call.constraint is not None:
            raise self._unsupported(
                f"{FEATURE_NAMES[type(call.constraint)]} in plain text",
                "Write the program with roles, or use a radixrt server.",
            )
        if call.stream_values:
            raise self._unsupported(
                "values of an answer that is not complete (gen's stream_values=)", "Leave it out."
            )
        if call.continues:
            raise self._unsupported(
                "a gen that continues a message of the assistant",
                "Begin each assistant message with its one gen, or use a radixrt server.",
            )
        for name in call.sampling.given():
            if name not in STANDARD_SAMPLING:
                raise self._unsupported(f"the sampling setting {name}", "Leave it out.")

    def _unsupported(self, feature: str, instead: str) -> UnsupportedFeature:
        return UnsupportedFeature(feature, self.name, instead)


def without_old_reasoning(messages: Prompt) -> list[dict[str, Any]]:
    """Messages without the reasoning of finished tool loops.

    Within a tool loop models continue from their reasoning, and servers that return it ask for it.
    After the next user message they refuse or ignore it.
    """
    assert not isinstance(messages, str)
    asked_at = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return [
        message
        if number > asked_at and "tool_calls" in message
        else {name: value for name, value in message.items() if name != "reasoning_content"}
        for number, message in enumerate(messages)
    ]


def _beyond(start: int, logprobs: dict[str, Any]) -> tuple[float, ...]:
    """The log-probabilities of the tokens that end after a place in the text; raises ValueError if
    there are none."""
    offsets: list[int] = logprobs["text_offset"]
    values: list[float | None] = logprobs["token_logprobs"]
    ends = [*offsets[1:], float("inf")]
    beyond = tuple(
        value for value, end in zip(values, ends, strict=True) if end > start and value is not None
    )
    if not beyond:
        raise ValueError("it sent none")
    return beyond


def _with_schema(call: Call, choices: Choices) -> Call:
    """The call with a JSON schema in the place of choices. It does not stream: half an object has
    no text."""
    schema = {
        "type": "object",
        "properties": {CHOICE_PROPERTY: {"type": "string", "enum": list(choices.texts)}},
        "required": [CHOICE_PROPERTY],
        "additionalProperties": False,
    }
    return dataclasses.replace(call, constraint=JsonSchema(schema, CHOICE_PROPERTY), stream=False)


def _without_object(piece: Piece) -> Piece:
    """A whole answer with the choice as its text. An answer that is no such object, such as one cut
    off, stays."""
    try:
        return dataclasses.replace(piece, text=msgspec.json.decode(piece.text)[CHOICE_PROPERTY])
    except (msgspec.DecodeError, KeyError, TypeError):
        return piece
