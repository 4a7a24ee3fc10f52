"""Streams chat answers from an OpenAI-compatible server, and keeps the state of one chat: messages,
system prompt, schema, totals."""

import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from radixrt.base.errors import RadixrtError
from radixrt.base.image_parts import data_url

CONNECT_TIMEOUT_S = 10.0
LONG_PROMPT_MS = 500
"""The progress of a prompt is shown if it takes longer than this."""


MAX_CONTINUATION = 200
"""Tokens after a text where no limit is given: few models without a chat template end by themselves."""


class ChatError(RadixrtError):
    """The server cannot be reached, or refused the request; the message names the next step."""


class NoServerError(ChatError):
    """Nothing answers at the address."""


class NotAServerError(ChatError):
    """A program answers there, but it lists no models as OpenAI's API does."""


class Piece(NamedTuple):
    """A part of an answer."""

    kind: Literal["progress", "reasoning", "content"]
    text: str
    """Of "progress": how much of the prompt is computed. It is no part of the answer."""


@dataclass
class AnswerStats:
    """Token counts and times of one answer; times in seconds after the request was sent."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_piece_s: float = 0.0
    last_piece_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed after the first token; None where there is too little to measure."""
        seconds = self.last_piece_s - self.first_piece_s
        return (
            (self.output_tokens - 1) / seconds if seconds > 0 and self.output_tokens > 1 else None
        )

    def line(self) -> str:
        """
        >>> AnswerStats(prompt_tokens=50, cached_tokens=40, output_tokens=11, first_piece_s=0.25, last_piece_s=0.75).line()
        '11 tokens · 20.0 tokens/s · first after 0.25 s · 40 of 50 prompt tokens from the cache (80 %)'
        """
        parts = [f"{self.output_tokens} token{'s' * (self.output_tokens != 1)}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        parts.append(f"first after {self.first_piece_s:.2f} s")
        if self.prompt_tokens:
            share = self.cached_tokens / self.prompt_tokens
            parts.append(
                f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from the cache ({share:.0%})".replace(
                    "%", " %"
                )
            )
        if self.finish_reason == "length":
            parts.append("cut off at the token limit")
        return " · ".join(parts)


class ChatClient:
    """A connection to one server."""

    def __init__(
        self, url: str, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """
        Args:
            url: address of the server, with or without ``/v1`` at its end.
            tls: certificates that are trusted; None: those of the system.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.asks_for_progress = False
        """Requests have ``return_progress``, which other servers than radixrt may refuse."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            verify=True if tls is None else tls,
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``.

        Raises:
            ChatError: no server answers there, or it is none that lists models.
        """
        try:
            response = self._http.get(f"{self.url}/v1/models", timeout=CONNECT_TIMEOUT_S)
            if response.status_code not in (401, 403, 429, 503) and not response.is_success:
                raise ValueError
            _check(response)
            entries = response.json()["data"]
            self.asks_for_progress = any(one.get("owned_by") == "radixrt" for one in entries)
            return [entry for entry in entries if isinstance(entry["id"], str)]
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ChatError(f"{self.url} is no address of a server ({error}).") from error
        except httpx.TransportError as error:
            raise NoServerError(f"No server answers at {self.url} ({error}).") from error
        except (ValueError, KeyError, TypeError) as error:
            raise NotAServerError(
                f"The server at {self.url} speaks no OpenAI-compatible API."
            ) from error

    def get(self, path: str) -> Any:
        """The JSON at a path of the server.

        Raises:
            ChatError: the server cannot be reached, or refuses it.
        """
        try:
            response = self._http.get(f"{self.url}{path}", timeout=CONNECT_TIMEOUT_S)
            _check(response)
            return response.json()
        except (httpx.TransportError, ValueError) as error:
            raise ChatError(f"{self.url}{path} cannot be read ({error}).") from error

    def is_ready(self) -> bool:
        """Whether a radixrt server answers there and has loaded its model."""
        try:
            return self._http.get(f"{self.url}/ready", timeout=CONNECT_TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def has_chat_template(self) -> bool:
        """Whether the model takes chats; servers other than radixrt do not say, and are believed
        to."""
        try:
            info = self._http.get(f"{self.url}/get_model_info", timeout=CONNECT_TIMEOUT_S)
            return bool(info.json().get("has_chat_template", True)) if info.is_success else True
        except (httpx.TransportError, ValueError, AttributeError):
            return True

    def stream(self, body: dict[str, Any], stats: AnswerStats) -> Iterator[Piece]:
        """Send a request for a chat or a completion and yield its answer; closing the iterator stops the answer.

        Args:
            body: the request without the fields that ask for a stream.
            stats: filled while the answer comes.

        Raises:
            ChatError: the server refused the request, or the connection was lost.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        is_chat = "prompt" not in body
        path = "chat/completions" if is_chat else "completions"
        if self.asks_for_progress and is_chat:
            body["return_progress"] = True
        sent = time.monotonic()
        try:
            with self._http.stream("POST", f"{self.url}/v1/{path}", json=body) as response:
                if response.is_error:
                    response.read()
                _check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                        continue
                    for piece in _pieces(json.loads(data), stats):
                        if piece.kind == "progress":
                            yield piece
                            continue
                        stats.last_piece_s = time.monotonic() - sent
                        stats.first_piece_s = stats.first_piece_s or stats.last_piece_s
                        yield piece
        except httpx.TransportError as error:
            raise ChatError(f"The connection to {self.url} was lost ({error}).") from error


def _pieces(event: dict[str, Any], stats: AnswerStats) -> Iterator[Piece]:
    """The text of one event; its counts go into ``stats``.

    Raises:
        ChatError: it is an error event.
    """
    if "error" in event:
        raise ChatError(_message(event["error"]))
    if usage := event.get("usage"):
        stats.prompt_tokens = usage.get("prompt_tokens") or 0
        stats.output_tokens = usage.get("completion_tokens") or 0
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    progress = event.get("prompt_progress")
    if progress and progress["time_ms"] > LONG_PROMPT_MS:
        yield Piece("progress", f"{progress['processed']:,} of {progress['total']:,} tokens")
    for choice in event.get("choices", ()):
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Piece("reasoning", reasoning)
        if content := delta.get("content") or choice.get("text"):
            yield Piece("content", content)


def _check(response: httpx.Response) -> None:
    if not response.is_error:
        return
    if response.status_code == 401:
        raise ChatError("The server wants an API key: set RADIXRT_API_KEY, or give --api-key.")
    try:
        message = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ChatError(f"The server answered {response.status_code}: {message}")


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class Conversation:
    """Messages between a user and one model."""

    def __init__(
        self, client: ChatClient, model: str, options: dict[str, Any], *, completes: bool = False
    ) -> None:
        """
        Args:
            options: further fields of each request, such as ``temperature``.
            completes: the model has no chat template, and continues each text by itself.
        """
        self.completes = completes
        self._client = client
        self.model = model
        self._options = options
        self.system: str | None = None
        self.schema: dict[str, Any] | None = None
        self.messages: list[dict[str, Any]] = []
        self._attached: list[str] = []
        """Data URLs of the images of the next question."""
        self.answers: list[AnswerStats] = []

    def body(self) -> dict[str, Any]:
        """The request that asks for the next answer."""
        if self.completes:
            prompt = self.messages[-1]["content"] if self.messages else ""
            limit = {"max_tokens": MAX_CONTINUATION}
            return {
                "model": self.model,
                "prompt": prompt,
                **limit,
                **self._options,
            } | self._format()
        head = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": head + self.messages, **self._options}
        return body | self._format()

    def _format(self) -> dict[str, Any]:
        if self.schema is None:
            return {}
        format = {"name": "answer", "strict": True, "schema": self.schema}
        return {"response_format": {"type": "json_schema", "json_schema": format}}

    def ask(self, question: str) -> Iterator[Piece]:
        """Yield the answer to ``question``. What has come of it stays in the history, also if it is
        interrupted.

        Raises:
            ChatError: the server gave no answer; the question is not kept.
        """
        asked: str | list[dict[str, Any]] = question
        if self._attached:
            images = [{"type": "image_url", "image_url": {"url": url}} for url in self._attached]
            asked = [*images, {"type": "text", "text": question}]
        self.messages.append({"role": "user", "content": asked})
        self._attached = []
        stats, content = AnswerStats(), ""
        try:
            for piece in self._client.stream(self.body(), stats):
                content += piece.text if piece.kind == "content" else ""
                yield piece
        except ChatError:
            self.messages.pop()
            raise
        except BaseException:  # Ctrl-C
            self._keep(content, stats)
            raise
        self._keep(content, stats)

    def _keep(self, content: str, stats: AnswerStats) -> None:
        if content:
            self.messages.append({"role": "assistant", "content": content})
        else:
            self.messages.pop()
        self.answers.append(stats)

    def attach(self, file: str) -> None:
        """Send an image with the next question.

        Raises:
            ChatError: the file cannot be read, or the model takes no messages.
        """
        if self.completes:
            raise ChatError("This model has no chat template, so it takes no images.")
        try:
            self._attached.append(data_url(file))
        except OSError as error:
            raise ChatError(f"{file} cannot be read: {error.strerror}.") from error

    def clear(self) -> None:
        """Forget all messages; system prompt and schema stay."""
        self.messages.clear()

    def set_schema(self, file: str) -> None:
        """Hold the answers to the JSON schema in ``file``.

        Raises:
            ChatError: the file cannot be read, or holds no JSON object.
        """
        try:
            schema = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ChatError(f"{file} cannot be read as a JSON schema: {error}.") from error
        if not isinstance(schema, dict):
            raise ChatError(f"{file} holds no JSON object, so it is no schema.")
        self.schema = schema

    def save(self, file: str) -> None:
        """Write the chat as the JSON body of a chat request.

        Raises:
            ChatError: the file cannot be written.
        """
        try:
            text = json.dumps(self.body(), indent=2, ensure_ascii=False)
            Path(file).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ChatError(f"{file} cannot be written: {error}.") from error

    def totals(self) -> str:
        """One line about all answers."""
        prompt = sum(answer.prompt_tokens for answer in self.answers)
        cached = sum(answer.cached_tokens for answer in self.answers)
        output = sum(answer.output_tokens for answer in self.answers)
        share = f" ({cached / prompt:.0%})".replace("%", " %") if prompt else ""
        return (
            f"{len(self.answers)} answers · {output} tokens · {cached} of {prompt} prompt tokens from the cache{share}"
            f" · {len(self.messages)} messages in the history"
        )
