"""Reads the prompt of a request: messages for the chat template, a text, or token ids."""

from array import array
from typing import Any

import numpy as np

from radixrt.api.conversations.continuation import Continuation
from radixrt.api.requests.messages import (
    cache_breakpoints,
    to_template_messages,
    without_cache_control,
)
from radixrt.api.requests.options import check_answer_count
from radixrt.api.requests.protocol import ChatCompletionRequest, ChatMessage, PromptRequest
from radixrt.api.requests.tools import offered_tools
from radixrt.api.state import Context, ServerState
from radixrt.base.convert import check_depth
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt


def one_prompt(
    fields: PromptRequest, context: Context, opens_turn: bool = True
) -> TextPrompt | ChatPrompt:
    """The prompt of a request that has one, as messages or as a text.

    Raises:
        RequestError: there is not exactly one prompt, or it is not well formed.
    """
    continuation = Continuation.find_one_prompt(fields, context)
    if fields.messages is not None:
        return chat_prompt(fields, fields.messages, continuation.messages, opens_turn)
    if fields.tools is not None:
        raise wrong("tools", "are for the chat template, so they need messages")
    text = continuation.text + (fields.prompt or "")
    return TextPrompt(text, fields.add_special_tokens is not False)


def chat_prompt(
    fields: ChatCompletionRequest | PromptRequest,
    new: list[ChatMessage],
    kept: list[dict[str, Any]],
    opens_turn: bool = True,
    instructions: str = "",
) -> ChatPrompt:
    """
    Args:
        instructions: a system message before all others; "": none.
        new: the request's own messages.
        kept: the messages of a kept conversation before them.
        opens_turn: whether the template adds a generation prompt, unless the request decides it.

    Raises:
        RequestError: there are no messages, or a chat template can't take them.
    """
    tools = offered_tools(fields)
    check_depth(fields.chat_template_kwargs, "chat_template_kwargs")
    before = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*before, *kept, *to_template_messages(new)]
    if not messages:
        raise wrong("messages", "is empty; give at least one message")
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise wrong("continue_final_message", "and add_generation_prompt exclude each other")
        if messages[-1]["role"] != "assistant":
            raise wrong(
                "continue_final_message", "needs a last message of the assistant, to be continued"
            )
        opens_turn = False
    elif fields.add_generation_prompt is not None:
        opens_turn = fields.add_generation_prompt
    template_kwargs = fields.chat_template_kwargs
    if fields.reasoning_effort is not None:
        template_kwargs = {"reasoning_effort": fields.reasoning_effort} | (template_kwargs or {})
    return ChatPrompt(
        messages=messages,
        tools=without_cache_control(tools),
        add_generation_prompt=opens_turn,
        continue_final_message=bool(fields.continue_final_message),
        template_kwargs=template_kwargs,
        cache_breakpoints=cache_breakpoints(
            new, tools, len(before) + len(kept), getattr(fields, "prompt_cache_options", None)
        ),
        replay_reasoning=bool(fields.replay_reasoning),
    )


def parse_prompts(
    prompt: str | list[Any],
    state: ServerState,
    add_special_tokens: bool = True,
    n: int = 1,
    field: str = "prompt",
) -> list[Prompt]:
    """One prompt a text or a list of token ids.

    Args:
        n: answers to each of them.
        field: that errors name.

    Raises:
        RequestError: it is none of the four forms, there are too many prompts, or an id is not in
            the vocabulary.
    """
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt:
        raise wrong(field, "is an empty list; give at least one text")
    kinds = set(map(type, prompt))
    if kinds & {str, list}:
        check_answer_count(state.config, len(prompt), n)  # before they are looked at
    if kinds == {str}:
        return [TextPrompt(text, add_special_tokens) for text in prompt]
    if kinds == {list}:
        return [token_prompt(ids, state.info.vocab_size, field) for ids in prompt]
    return [token_prompt(prompt, state.info.vocab_size, field)]


def token_prompt(ids: list[Any], vocab_size: int, field: str = "prompt") -> TokenPrompt:
    """Raises RequestError if it is empty, or not a list of token ids of the vocabulary."""
    if not ids:
        raise wrong(field, "is empty; give at least one token")
    if set(map(type, ids)) != {int}:  # bools would count as integers
        other = next(value for value in ids if type(value) is not int)
        raise wrong(
            field,
            f"must be text or token ids, one or a list of them, not mixed; it holds {shown(other)}",
        )
    try:
        packed = np.frombuffer(array("i", ids), dtype=np.int32)
        bounds = int(packed.min()), int(packed.max())
    except OverflowError:
        bounds = min(ids), max(ids)
    for token_id in bounds:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"Token id {token_id} is not in the vocabulary; ids go from 0 to {vocab_size - 1}.",
                param=field,
            )
    return TokenPrompt(pack_ids(packed))
