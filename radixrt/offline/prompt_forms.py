"""Reads the prompts of a Python program: text, token ids, or the messages of a chat."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from radixrt.base.convert import check_depth
from radixrt.base.errors import RequestError, wrong
from radixrt.base.image_parts import IMAGE_PARTS, image_part
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

PromptLike = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[dict[str, Any]]
"""The messages of a chat, each with a role and content."""


def list_of(values: Any, name: str) -> list[Any]:
    """A list of the values.

    Raises:
        RequestError: they are not a list; ``name`` is that in the error.
    """
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise wrong(name, f"must be a list, not {type(values).__name__}")
    return list(values)


def is_one_prompt(value: Any) -> bool:
    """Whether it is a text or token ids, and not a list of these."""
    return isinstance(value, str) or (
        isinstance(value, Sequence | np.ndarray)
        and len(value) > 0
        and isinstance(value[0], Integral)
    )


def prompt_or_chat(
    prompt: PromptLike | Messages,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    **flags: bool,
) -> Prompt:
    """The prompt of :func:`prompt_of`, or of :func:`chat_of` where it begins with a message."""
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
    if not is_chat:
        return prompt_of(prompt)  # type: ignore[arg-type]
    return chat_of(prompt, tools, template_kwargs, **flags)


def chat_of(
    messages: Any,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> ChatPrompt:
    """The wire form of a chat.

    Raises:
        RequestError: it is not a list of messages, or they are nested too deeply.
    """
    messages = list_of(messages, "messages")
    if not all(isinstance(message, dict) for message in messages):
        raise RequestError("A chat is a list of messages, each a dict with role and content.")
    check_depth([messages, tools, template_kwargs], "messages")
    return ChatPrompt(
        messages=[
            _with_read_images(message, f"messages[{i}]") for i, message in enumerate(messages)
        ],
        tools=tools,
        template_kwargs=template_kwargs,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
    )


def _with_read_images(message: dict[str, Any], where: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {
        **message,
        "content": [
            image_part(part, f"{where}.content[{index}]")
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS
            else part
            for index, part in enumerate(content)
        ],
    }


def prompt_of(prompt: PromptLike) -> Prompt:
    """The wire form of a prompt.

    Raises:
        RequestError: it is neither text nor token ids.
    """
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    ids = np.asarray(prompt if isinstance(prompt, Sequence | np.ndarray) else None)
    if isinstance(prompt, bytes) or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("A prompt must be text or a list of token ids.", param="prompts")
    if ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**31:
        raise RequestError(
            "The prompt holds a token id that is no 32-bit integer.", param="prompts"
        )
    return TokenPrompt(pack_ids(ids))
