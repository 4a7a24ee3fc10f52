"""Finds the tokens of an unfinished prompt that no later text changes, so that they can be computed
while the rest arrives.

A text is settled up to the last boundary of the tokenizer's words that more text cannot move: the
words that the pre-tokenizer splits off, but for the last two, since a word may grow and the space
before it may join what follows. Where nothing splits the text (SentencePiece's BPE runs over all of
it), white space does. A chat is settled as far as the template writes the same whatever follows.

A wrong guess costs a miss of the cache, never a wrong answer: the whole prompt is encoded when it
is complete.
"""

from collections.abc import Sequence
from dataclasses import replace as dataclass_replace
from itertools import islice
from typing import Any, Literal

import msgspec
from tokenizers import Encoding

from radixrt.base.common_prefix import common_prefix_length
from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.prompt_images import images_of
from radixrt.messages.requests import ChatPrompt, TextPrompt
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.chat_template import ChatTemplate, RenderedChat
from radixrt.tokenizer.vocabulary import Vocabulary

Growth = Literal["text", "messages"]
"""What may follow: more text of the last message (or of the text), or only further messages."""

OPEN_WORDS = 2
"""Words at the end that later text may change."""

MARGIN_TOKENS = 16
"""Tokens given up at the end of a chat with special tokens in its texts, which is encoded at
once."""

_ONE, _OTHER = "\ue0001", "\ue0012"
"""Texts that begin unlike each other, and like no other."""


class SettledEncoder:
    """Encodes the beginnings of prompts."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template

    def encode(
        self, prompt: TextPrompt | ChatPrompt, growth: Growth, limits: Limits, root: CacheRoot
    ) -> list[int]:
        """The leading token ids that are settled; none if nothing is.

        Raises:
            RequestError: the text is far too long, or refused by the chat template.
        """
        if isinstance(prompt, TextPrompt):
            self._vocabulary.check_text(prompt.text, limits)
            return self._of_text(prompt.text, prompt.add_special_tokens)
        if images_of(prompt):
            return []
        chat = self._of_chat(prompt, growth, limits, root)
        if chat is None:
            return []
        self._vocabulary.check_text(chat.text, limits)
        _, ids, _, segments = self._template.encode(chat, root, limits.check_num_tokens)
        if not segments:
            return ids[:-MARGIN_TOKENS]
        last = segments[-1]
        if last.is_answer:
            return ids[: len(ids) - len(last.ids)]
        return ids[: len(ids) - len(last.ids)] + self._of_text(last.text, False)

    def _of_text(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._vocabulary.backend.encode_batch(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        surplus = self._vocabulary.surplus_at_start(ids) if add_special_tokens else 0
        return ids[surplus : settled_length(encoding, text)]

    def _of_chat(
        self, prompt: ChatPrompt, growth: Growth, limits: Limits, root: CacheRoot
    ) -> RenderedChat | None:
        """The part of the rendered chat that is the same whatever follows."""
        one, other = (self._followed(prompt, text, limits, root) for text in (_ONE, _OTHER))
        chats = [one, other]
        last = prompt.messages[-1]
        if growth == "text" and isinstance(content := last.get("content"), str):
            grown = [*prompt.messages[:-1], {**last, "content": content + _OTHER}]
            chats.append(self._render(prompt, grown, limits, root))
        length = min(common_prefix_length(chat.text, one.text) for chat in chats[1:])
        if not length:
            return None
        ends = [end for end in one.answer_ends if end <= length]
        return dataclass_replace(
            one, text=one.text[:length], agreed=[], answer_ends=ends, spans=[], turn=None
        )

    def _followed(
        self, prompt: ChatPrompt, text: str, limits: Limits, root: CacheRoot
    ) -> RenderedChat:
        """The chat with a message behind it, of the role that is likely to come; a template may
        refuse two of one role in a row."""
        role = "tool" if prompt.messages[-1].get("tool_calls") else "user"
        try:
            following = {"role": role, "content": text}
            return self._render(prompt, [*prompt.messages, following], limits, root)
        except RequestError:
            following = {"role": "assistant", "content": text}
            return self._render(prompt, [*prompt.messages, following], limits, root)

    def _render(
        self,
        prompt: ChatPrompt,
        messages: Sequence[dict[str, Any]],
        limits: Limits,
        root: CacheRoot,
    ) -> RenderedChat:
        changed = msgspec.structs.replace(
            prompt,
            messages=list(messages),
            add_generation_prompt=False,
            continue_final_message=False,
            cache_breakpoints=[],
        )
        return self._template.render(changed, root, limits.call_tokens)


def settled_length(encoding: Encoding, text: str) -> int:
    """Number of leading tokens of a text that more text does not change.

    Args:
        encoding: of the text, with offsets.
    """
    words, offsets = encoding.word_ids, encoding.offsets
    last_starts = (
        position
        for position in range(len(words) - 1, 0, -1)
        if words[position] is not None and words[position] != words[position - 1]
    )
    length = next(islice(last_starts, OPEN_WORDS - 1, None), None)
    if length is None:
        length = _before_white_space(offsets, text)
    while 0 < length < len(offsets) and _splits_a_number(text, offsets[length][0]):
        length -= 1
    return length


def _before_white_space(offsets: Sequence[tuple[int, int]], text: str) -> int:
    """Tokens before the white space in front of the last complete word."""
    end = len(text.rstrip())
    for _ in range(OPEN_WORDS):
        end = len(text[:end].rstrip())
        while end and not text[end - 1].isspace():
            end -= 1
    end = len(text[:end].rstrip())
    return sum(1 for _, stop in offsets if stop <= end) if end else 0


def _splits_a_number(text: str, position: int) -> bool:
    """Whether digits stand on both sides: some tokenizers group them from the right."""
    return 0 < position < len(text) and text[position - 1].isdigit() and text[position].isdigit()
