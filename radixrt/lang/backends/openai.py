"""How does any OpenAI-compatible server answer a program's calls? By standard fields alone; the rest is refused."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.openai_choices import with_schema, without_object
from radixrt.lang.backends.openai_format import (
    STANDARD_SAMPLING,
    path_of,
    pieces_of,
    standard_body,
)
from radixrt.lang.backends.protocol import Backend, Call, ChoiceCall, Piece, Prompt, Score, Scored
from radixrt.lang.constraints import FEATURE_NAMES, Choices, JsonSchema
from radixrt.lang.errors import BadRequest, UnsupportedFeature


class OpenAI(Backend):
    """A server with OpenAI's API.

    Args:
        base_url: its address, with or without ``/v1``.
        api_key: sent as a bearer token.
        model: which of its models.
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
            call = with_schema(call, choices)
        body = standard_body(call, self.model)
        if "messages" in body:
            body["messages"] = without_old_thoughts(call.prompt)
        async with aclosing(self._http.answer(path_of(call), body)) as events:
            async for event in events:
                for piece in pieces_of(event):
                    yield piece if choices is None else without_object(piece)

    async def score(self, call: ChoiceCall) -> Scored:
        """Have the prompt with each choice behind it echoed with log-probabilities; only completions offer that."""
        prompt, choices, unconditional = call.prompt, call.choices, call.unconditional
        if not isinstance(prompt, str):
            raise self._unsupported(
                "log-probabilities of a conversation's tokens, which select needs",
                "Let the model write one of them, rl.gen(choices=[...]), or write the program as plain text without roles.",
            )
        if not prompt:
            raise self._unsupported("select at the very beginning of a text", "Put text before it.")
        texts = [prompt + choice for choice in choices]
        starts = [len(prompt)] * len(choices)
        if unconditional:
            texts += [f"\n{choice}" for choice in choices]
            starts += [1] * len(choices)
        logprobs = await self._echoed(texts, starts)
        without = logprobs[len(choices) :] if unconditional else [()] * len(choices)
        return Scored([Score(*pair) for pair in zip(logprobs, without, strict=False)])

    async def _echoed(self, texts: list[str], starts: list[int]) -> list[tuple[float, ...]]:
        """The log-probabilities of each text's tokens that reach beyond its start, in one batch."""
        body = {
            "model": self.model, "prompt": texts, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0,
        }  # fmt: skip
        try:
            answer = await self._http.post("/v1/completions", body)
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
        """Raises:
        UnsupportedFeature: the call needs a field that is not standard.
        """
        if call.constraint is not None and not isinstance(call.constraint, JsonSchema | Choices):
            raise self._unsupported(
                FEATURE_NAMES[type(call.constraint)], "Use gen's schema=, or a radixrt server."
            )
        if isinstance(call.prompt, str) and call.constraint is not None:
            raise self._unsupported(
                f"{FEATURE_NAMES[type(call.constraint)]} in plain text",
                "Write the program with roles, or use a radixrt server.",
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


def without_old_thoughts(messages: Prompt) -> list[dict[str, Any]]:
    """Thoughts go back only within a loop of tools: there models go on thinking from them, and servers that tell thoughts
    ask for them. Behind the next message of the user they refuse them, or leave them out."""
    assert not isinstance(messages, str)
    asked_at = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return [
        message
        if number > asked_at and "tool_calls" in message
        else {name: value for name, value in message.items() if name != "reasoning_content"}
        for number, message in enumerate(messages)
    ]


def _beyond(start: int, logprobs: dict[str, Any]) -> tuple[float, ...]:
    """Of the tokens that end after a place in the text.

    Raises:
        ValueError: there are none.
    """
    offsets: list[int] = logprobs["text_offset"]
    values: list[float | None] = logprobs["token_logprobs"]
    ends = [*offsets[1:], float("inf")]
    beyond = tuple(
        value for value, end in zip(values, ends, strict=True) if end > start and value is not None
    )
    if not beyond:
        raise ValueError("it sent none")
    return beyond
