"""The images of prompts, as the content parts that hold them: ``{"type": "image", "data": base64}``,
or ``"url"`` in the place of ``"data"`` until the file is fetched."""

from collections.abc import Iterable
from typing import Any

import msgspec

from radixrt.messages.requests import ChatPrompt, Prompt, TokenPrompt


def images_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The parts of all images in a prompt, in order.

    >>> images_of(ChatPrompt([{"content": [{"type": "image", "data": "AAAA"}]}, {"content": "Hello"}]))
    [{'type': 'image', 'data': 'AAAA'}]
    """
    match prompt:
        case TokenPrompt():
            return prompt.images
        case ChatPrompt():
            contents = (message.get("content") for message in prompt.messages)
            lists = (content for content in contents if isinstance(content, list))
            return [part for content in lists for part in content if _is_image(part)]
    return []


def with_images(prompt: ChatPrompt, images: Iterable[dict[str, Any]]) -> ChatPrompt:
    """A chat with other parts in the place of its images, in order."""
    remaining = iter(images)
    messages = [
        {**message, "content": [next(remaining) if _is_image(part) else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in prompt.messages
    ]
    return msgspec.structs.replace(prompt, messages=messages)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"
