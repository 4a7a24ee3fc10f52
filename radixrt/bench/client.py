"""Streams answers from an OpenAI-compatible server and records the arrival times of their
tokens."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from radixrt.bench.arguments import EndpointName
from radixrt.bench.workloads import Conversation, Prompt


@dataclass
class RequestRecord:
    """One request as the client saw it; times in seconds of time.perf_counter."""

    sent: float
    conversation: int
    turn: int
    token_times: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    token_counts: list[int] = field(default_factory=list)
    """How many tokens it held."""
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    """Tokens of the answer that were computed for an equal request before."""
    answer: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Of the answer, where the server names them."""
    finish_reason: str | None = None
    """None: the server didn't say, or the answer was cut off."""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Time from sending to the last token."""
        return self.token_times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Gaps between tokens; those of a chunk share the gap before it evenly."""
        gaps: list[float] = []
        for before, now, count in zip(
            self.token_times, self.token_times[1:], self.token_counts[1:], strict=False
        ):
            gaps += [(now - before) / count] * count
        return gaps


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    replayed_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of ``reasoning_content``."""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """The part of a streamed chunk that is measured; the same for completions and chat."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Target:
    """A server and how to speak to it."""

    base_url: str
    """Ends in /v1, as for the openai client."""
    model: str
    endpoint: EndpointName = "completions"
    ignore_eos: bool = True
    return_token_ids: bool = False
    """Ask for the answer's token ids, so that tokens are counted and not chunks."""

    def body(self, history: list[Prompt], output_len: int) -> dict[str, Any]:
        """The request that continues ``history``: context, question, answer, question, ..."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = _chat_messages(history)
        elif isinstance(history[-1], str):
            body["prompt"] = "".join(str(part) for part in history)
        else:
            body["prompt"] = [token for part in history for token in part]
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        return body

    @property
    def path(self) -> str:
        name = "chat/completions" if self.endpoint == "chat" else "completions"
        return f"{self.base_url}/{name}"


def _chat_messages(history: list[Prompt]) -> list[dict[str, Any]]:
    context, *rest = history
    messages = [{"role": "system", "content": context}] if context else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": part} for i, part in enumerate(rest)]


async def converse(
    client: httpx.AsyncClient, target: Target, number: int, conversation: Conversation
) -> AsyncIterator[RequestRecord]:
    """Ask a conversation's questions one after another; ends early when one fails."""
    history: list[Prompt] = [conversation.context]
    for turn_number, turn in enumerate(conversation.turns):
        history.append(turn.question)
        record = RequestRecord(sent=time.perf_counter(), conversation=number, turn=turn_number)
        body = target.body(history, turn.output_len)
        if conversation.messages is not None:
            body["messages"] = conversation.messages
        await _ask(client, target, body, record)
        as_tokens = isinstance(turn.question, list)
        if as_tokens and not record.token_ids and len(conversation.turns) > 1 and not record.error:
            record.error = "the server names no token ids to continue from: use --prompts text"
        history.append(record.token_ids if as_tokens else record.answer)
        yield record
        if record.error:
            return


async def _ask(
    client: httpx.AsyncClient, target: Target, body: dict[str, Any], record: RequestRecord
) -> None:
    """Send one request and fill in its record; any failure becomes the error of the record."""
    try:
        async with client.stream("POST", target.path, json=body) as response:
            if response.status_code != 200:
                detail = (await response.aread()).decode(errors="replace")
                record.error = f"HTTP {response.status_code}: {detail[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    _absorb(_decode(line[5:]), record)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        record.error = f"{type(error).__name__}: {error}".removesuffix(": ")
    finally:
        record.finished = time.perf_counter()
    if not record.error and not record.token_times:
        record.error = "the answer held no token"
    if not record.output_tokens:
        record.output_tokens = sum(record.token_counts)


def _absorb(event: _Event, record: RequestRecord) -> None:
    """Note one streamed chunk, at the moment it came."""
    if event.error is not None:
        record.error = f"in the stream: {str(event.error)[:200]}"
    if event.usage is not None:
        record.prompt_tokens = event.usage.prompt_tokens
        record.output_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        record.cached_tokens = (details and details.cached_tokens) or 0
        record.replayed_tokens = event.usage.replayed_tokens or 0
    for choice in event.choices:
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or ""
        record.answer += text
        record.finish_reason = choice.finish_reason or record.finish_reason
        count = 1 if text or delta.reasoning_content or delta.reasoning else 0
        if choice.token_ids is not None:
            count = len(choice.token_ids)
            record.token_ids += choice.token_ids
        if count:
            record.token_times.append(time.perf_counter())
            record.token_counts.append(count)
