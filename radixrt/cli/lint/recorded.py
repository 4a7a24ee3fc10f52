"""Reads recorded requests: bodies of chats, completions, messages and responses, alone or as lines
of OpenAI's batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from radixrt.api.anthropic.translation import MessagesRequest
from radixrt.api.anthropic.translation import to_chat as chat_of_message
from radixrt.api.http.endpoints import to_struct
from radixrt.api.openai_responses.translation import ResponsesRequest
from radixrt.api.openai_responses.translation import to_chat as chat_of_response
from radixrt.api.requests.prompts import chat_prompt, token_prompt
from radixrt.api.requests.protocol import ChatCompletionRequest, CompletionRequest
from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.requests import Prompt, TextPrompt

_ANY_ID = 1 << 31
"""The linter checks ids against the vocabulary."""


@dataclass(frozen=True)
class Recorded:
    """One request of a log."""

    line: int
    """Counted from 1."""
    prompt: Prompt
    root: CacheRoot
    computed_tokens: int = 0
    """Prompt tokens that its response says were not cached; 0 where there is no response with usage
    and times."""
    prefill_s: float = 0.0
    """Seconds that its response says the prefill took."""


@dataclass(frozen=True)
class Unreadable:
    """A line that is no request."""

    line: int
    reason: str


def read_log(path: Path) -> Iterator[Recorded | Unreadable]:
    """The requests of a log, in order. Empty lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _recorded(number, msgspec.json.decode(line))
            except RequestError as error:
                yield Unreadable(number, error.message)
            except (msgspec.DecodeError, ValueError) as error:
                yield Unreadable(number, f"not a request in JSON: {error}")
            except RecursionError:
                yield Unreadable(number, "not a request: its JSON is nested too deeply")


def _recorded(number: int, line: Any) -> Recorded:
    """Raises RequestError if it is no request with one prompt."""
    if not isinstance(line, dict):
        raise RequestError("a line must be a JSON object")
    if "hash_ids" in line:
        raise RequestError(
            "lines of --request-log hold hashes of prompts, no text; record the bodies of requests"
        )
    body = line.get("body", line.get("request", line))
    if not isinstance(body, dict):
        raise RequestError("the body of the request must be a JSON object")
    response = line.get("response")
    response = response.get("body", response) if isinstance(response, dict) else {}
    computed, seconds = _measured(response)
    prompt = _prompt(body, str(line.get("url", "")))
    root = CacheRoot(salt=str(body.get("cache_salt") or ""))
    return Recorded(number, prompt, root, computed, seconds)


def _prompt(body: dict[str, Any], url: str) -> Prompt:
    if url.endswith("/messages") or ("messages" in body and "system" in body):
        return _of_chat(chat_of_message(to_struct(body, MessagesRequest)))
    if "messages" in body:
        return _of_chat(to_struct(body, ChatCompletionRequest))
    if "input" in body:
        fields = to_struct(body, ResponsesRequest)
        return _of_chat(chat_of_response(fields), fields.instructions or "")
    given = to_struct(body, CompletionRequest)
    match given.prompt:
        case str(text):
            return TextPrompt(text, given.add_special_tokens is not False)
        case [int(), *_] as ids:
            return token_prompt(ids, _ANY_ID, "prompt")
    raise RequestError("a request to lint has one prompt, as a text or as token ids")


def _of_chat(fields: ChatCompletionRequest, instructions: str = "") -> Prompt:
    if fields.continue_from:
        raise RequestError("it continues a conversation that only the server has")
    return chat_prompt(fields, fields.messages, [], instructions=instructions)


def _measured(response: Any) -> tuple[int, float]:
    """Prompt tokens that were computed, and the seconds that it took, if a response tells both."""
    try:
        usage, seconds = response["usage"], float(response["times"]["prefill_s"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return (int(usage["prompt_tokens"]) - int(cached), seconds) if seconds >= 0 else (0, 0.0)
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0, 0.0
