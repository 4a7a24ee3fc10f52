"""Renders chats by the model's own template, with special tokens in user text kept inert.

Templates are Jinja, run in a sandbox that bounds time and memory (``template_sandbox.py``). A
template writes control tokens such as ``<|im_end|>`` as text. A user's message that contains such
text could end the message and begin another as the system. So special-token strings inside messages
are replaced by unguessable placeholders before rendering and become plain text again only after the
template's own control tokens are set.
"""

import contextlib
import dataclasses
import functools
import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from radixrt.base.errors import RequestError, wrong
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.images.spread import AS_THEY_ARE, Spread
from radixrt.tokenizer.prompt import template_sandbox
from radixrt.tokenizer.prompt.breakpoints import (
    Literals,
    Messages,
    agreed_length,
    num_tokens_within,
    substitute,
)
from radixrt.tokenizer.prompt.demanded_messages import (
    demands_nine_characters,
    reads_thinking,
    with_nine_characters,
    with_thinking,
)
from radixrt.tokenizer.prompt.kept_turns import History, KeptTurn, KeptTurns, OpenTurn
from radixrt.tokenizer.prompt.message_spans import answer_ends, message_spans
from radixrt.tokenizer.prompt.segments import CheckLength, Segment, any_length, joined
from radixrt.tokenizer.vocabulary import (
    Vocabulary,
    encode_aside,
    encode_aside_with_ends,
    template_parameters,
)


class _Literals:
    """The special-token strings in the messages of one chat."""

    def __init__(self, placeholder: Callable[[str, int], str], limit: int) -> None:
        self._placeholder = placeholder
        self._limit = limit
        self._count = 0
        self.placeholders: dict[str, str] = {}
        """The placeholder of each string, which may occur many times."""

    def hide(self, match: re.Match[str]) -> str:
        """The placeholder of an occurrence.

        Raises:
            RequestError: there are too many.
        """
        self._count += 1
        if self._count > self._limit:
            raise RequestError(
                f"The messages have more than {self._limit} special tokens such as {match.group()} in their texts, several times as "
                "many as fit into this model's context. Shorten them.",
                param="messages",
                code="context_length_exceeded",
            )
        literal = match.group()
        if literal not in self.placeholders:
            self.placeholders[literal] = self._placeholder("text", len(self.placeholders))
        return self.placeholders[literal]


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    text: str
    """The text, with placeholders in it, if there are literals."""
    literals: list[str]
    """Special-token strings from the messages, each to stand at its placeholders as plain text."""
    agreed: list[int]
    """Leading characters that the messages before each cache breakpoint settle."""
    answer_ends: list[int]
    """The places in the text where the contents of assistants' messages end."""
    spans: list[tuple[int, int]]
    """Beginning and end of each message's content in the text; empty, at the end of the one before,
    where it is not found."""
    turn: OpenTurn | None = None
    """Keeps the answer to a chat whose later requests are to repeat it."""


class ChatTemplate:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        strings = [token.content for token in vocabulary.special_tokens.values()]
        self._special = Literals(strings) if strings else None
        self._wants_short_ids = demands_nine_characters(vocabulary.hf.chat_template)
        self._reads_thinking = reads_thinking(vocabulary.hf.chat_template)
        self._nonce = secrets.token_hex(8)
        self.turns = KeptTurns()

    def render(
        self, prompt: ChatPrompt, root: CacheRoot = BASE_ROOT, max_literals: int = 1 << 16
    ) -> RenderedChat:
        """Run the template.

        Args:
            root: kept answers are repeated only in requests with the same one.
            max_literals: more special-token strings in the messages are refused.

        Raises:
            RequestError: the model has no template, or the template refuses the conversation.
        """
        literals = _Literals(self._placeholder, max_literals)
        given = prompt.messages
        if self._wants_short_ids:
            given = with_nine_characters(given)
        if self._reads_thinking:
            given = with_thinking(given, self._vocabulary.hf.chat_template)
        messages = self._hide_special_tokens(given, literals)
        tools = self._hide_special_tokens(prompt.tools, literals)
        kwargs = self._hide_special_tokens(prompt.template_kwargs or {}, literals)
        has_literals = bool(literals.placeholders)
        history = History(prompt, root) if prompt.replay_reasoning and not has_literals else None
        turn, text = self._replay(prompt, history, messages, tools, kwargs)
        beginning = msgspec.structs.replace(
            prompt, add_generation_prompt=False, continue_final_message=False
        )

        def render_some(some: Messages) -> str:
            is_beginning = len(some) <= len(messages) and some[-1] is messages[len(some) - 1]
            kept = history if is_beginning else None
            return self._replay(beginning, kept, some, tools, kwargs)[1]

        agreed = [
            agreed_length(render_some, text, messages, breakpoint.message)
            for breakpoint in prompt.cache_breakpoints
        ]
        spans = message_spans(text, messages)
        ends = answer_ends(messages, spans)
        if turn is not None:
            kept_ends = [kept.end for kept in turn.chain()]
            ends = sorted({*kept_ends, *(end for end in ends if end > turn.end)})
        opened = None
        if history is not None and not prompt.continue_final_message:
            opened = OpenTurn(self.turns, history, text, turn)
        return RenderedChat(text, list(literals.placeholders), agreed, ends, spans, opened)

    def encode(
        self,
        chat: RenderedChat,
        root: CacheRoot,
        check_length: CheckLength = any_length,
        spread: Spread = AS_THEY_ARE,
    ) -> tuple[str, list[int], list[int], list[Segment]]:
        """The prompt as text and as token ids, for each cache breakpoint the number of leading
        tokens that it covers, and the segments of the text, unless it has literals. Only the
        template adds special tokens.

        Args:
            root: messages that were encoded before with the same root are not encoded again.
            check_length: gets the number of tokens before they are copied.
            spread: repeats the placeholders of images.
        """
        if chat.literals:
            text, found, counts = self._encode_with_literals(chat, check_length)
            ids = np.array(found, dtype=np.int32)
            return text, spread(ids).tolist(), [len(spread(ids[:n])) for n in counts], []
        segments = self._vocabulary.segments.encode(chat.text, root, chat.answer_ends, check_length)
        counts = [self._num_tokens_within(segments, length, spread) for length in chat.agreed]
        whole, first = list[Segment](), 0
        for one in segments:
            whole.append(one._replace(ids=spread(one.ids, first)))
            first += spread.num_in(one.ids)
        return chat.text, joined(whole), counts, whole

    def messages_end(self, chat: RenderedChat, num_tokens: int) -> int:
        """Number of a chat's tokens up to the end of its last message, where the next turn may
        leave this prompt; 0 where more text than a generation prompt follows. A token or two off
        where the tokenizer joins characters of both sides.

        Args:
            num_tokens: of the whole prompt.
        """
        behind = chat.text[chat.spans[-1][1] :] if chat.spans else chat.text
        if len(behind) > MAX_BEHIND_MESSAGES:
            return 0
        return max(0, num_tokens - len(self._vocabulary.encode(behind, add_special_tokens=False)))

    def _num_tokens_within(self, segments: list[Segment], length: int, spread: Spread) -> int:
        """Number of leading tokens within the first ``length`` characters of a text.

        Args:
            segments: whose placeholders are not repeated.
        """
        count = first = 0
        for segment in segments:
            if segment.start + len(segment.text) > length:
                if segment.is_answer:
                    return count
                ids, ends = self._vocabulary.encode_with_ends(segment.text)
                within = ids[: num_tokens_within(ends, length - segment.start)]
                return count + len(spread(np.array(within, dtype=np.int32), first))
            count += len(spread(segment.ids, first))
            first += spread.num_in(segment.ids)
        return count

    def _replay(
        self,
        prompt: ChatPrompt,
        history: History | None,
        messages: Messages,
        tools: Any,
        kwargs: dict[str, Any],
    ) -> tuple[KeptTurn | None, str]:
        """The chat, rendered, and the kept turn with which it begins.

        Behind that turn is the text that the template writes behind its answer; a mark in place of
        the answer shows it.

        Args:
            history: None: no turn is repeated.
        """
        found = self.turns.last(history, len(messages)) if history is not None else None
        if found is not None:
            index, turn = found
            mark = self._placeholder("answer", index)
            marked = [*messages]
            marked[index] = {"role": "assistant", "content": mark}
            with contextlib.suppress(RequestError):  # the template wants the calls of tools
                _, *behind = self._render(prompt, marked, tools, kwargs).split(mark)
                if len(behind) == 1:
                    return turn, "".join(kept.text for kept in turn.chain()) + behind[0]
        return None, self._render(prompt, messages, tools, kwargs)

    def _render(self, prompt: ChatPrompt, messages: Any, tools: Any, kwargs: dict[str, Any]) -> str:
        if not self._vocabulary.hf.chat_template:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.",
                code="no_chat_template",
            )
        reserved = template_parameters().intersection(kwargs) if kwargs else ()
        if reserved:
            raise wrong("chat_template_kwargs", f"must not contain {', '.join(sorted(reserved))}")
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            with template_sandbox.bounded():
                text: str = self._vocabulary.hf.apply_chat_template(
                    messages,
                    tools=tools or None,
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    tokenize=False,
                    **kwargs,
                )
        except Exception as error:  # any error of the template or its sandbox
            raise RequestError(
                f"The model's chat template refused the conversation: {error}", param="messages"
            ) from error
        return text

    def _hide_special_tokens(self, value: Any, literals: "_Literals") -> Any:
        """A copy of a JSON value in which placeholders stand for special-token strings."""
        if isinstance(value, str):
            if self._special is None:
                return value
            return substitute(self._special, literals.hide, value, ())[0]
        if isinstance(value, list):
            return [self._hide_special_tokens(item, literals) for item in value]
        if isinstance(value, dict):
            return {
                self._hide_special_tokens(key, literals): self._hide_special_tokens(item, literals)
                for key, item in value.items()
            }
        return value

    def _encode_with_literals(
        self, chat: RenderedChat, check_length: CheckLength
    ) -> tuple[str, list[int], list[int]]:
        """Tokenize a rendered text in which the strings of ``literals`` are plain text.

        The tokenizer used reads no special token in text; it knows the template's own by other
        names.
        """
        plain_tokenizer, names, ids_of_names = self._plain_tokenizer
        assert self._special is not None
        text, agreed = substitute(
            self._special, lambda match: names[match.group()], chat.text, chat.agreed
        )
        text, agreed = substitute(
            self._hidden_literal, lambda match: chat.literals[int(match.group(1))], text, agreed
        )
        counts: list[int] = []
        if agreed:
            ids, ends = encode_aside_with_ends(plain_tokenizer, text)
            counts = [num_tokens_within(ends, length) for length in agreed]
        else:
            ids = encode_aside(plain_tokenizer, text, False, check_length)
        for special, name in names.items():
            text = text.replace(name, special)
        return text, [ids_of_names.get(i, i) for i in ids], counts

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether the template reads contents as lists of parts alone, as some of those for images
        do."""
        template = self._vocabulary.hf.chat_template
        if "image" not in str(template):
            return False
        probe = {"role": "user", "content": _PROBE}

        def shows(message: dict[str, Any]) -> bool:
            with contextlib.suppress(Exception), template_sandbox.bounded():
                render = self._vocabulary.hf.apply_chat_template
                return _PROBE in str(render([message], tokenize=False))
            return False

        return not shows(probe) and shows(_in_parts(probe))

    @functools.cached_property
    def _hidden_literal(self) -> re.Pattern[str]:
        return re.compile(f"\ue000{self._nonce}text([0-9]+)\ue001")

    def _placeholder(self, kind: str, number: int) -> str:
        return f"\ue000{self._nonce}{kind}{number}\ue001"

    @functools.cached_property
    def _plain_tokenizer(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer that takes special-token strings as text, the names under which
        it knows each special token instead, and the real ids of those names.

        Made when first needed, since it takes about a second for a large vocabulary.
        """
        tokenizer = Tokenizer.from_str(self._vocabulary.backend.to_str())
        tokenizer.encode_special_tokens = True
        names: dict[str, str] = {}
        ids: dict[int, int] = {}
        for number, (token_id, token) in enumerate(self._vocabulary.special_tokens.items()):
            name = self._placeholder("special", number)
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            tokenizer.add_tokens([AddedToken(name, normalized=False, special=False, **flags)])
            names[token.content] = name
            ids[tokenizer.encode(name, add_special_tokens=False).ids[0]] = token_id
        return tokenizer, names, ids


_PROBE = "radixrt"
"""A text that no template writes by itself."""


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


MAX_BEHIND_MESSAGES = 512
"""Characters behind the last message that may be a generation prompt."""
