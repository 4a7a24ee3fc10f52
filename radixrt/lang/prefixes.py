"""What do prompts begin with alike? In characters, or in whole messages."""

from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import Prompt


def num_shared(one: Prompt, other: Prompt) -> int:
    """How much two prompts begin with alike: messages, or characters; a text and a conversation share nothing."""
    if isinstance(one, str) and isinstance(other, str):
        return common_prefix_length(one, other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def num_chars(prompt: Prompt) -> int:
    """Of the text, or of the contents of all messages."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt)


def as_text(prompt: Prompt) -> str:
    """Such that prompts which begin alike have texts that do."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"\0{message['role']}\0{message['content']}" for message in prompt)
