"""The state of one chat: messages, system prompt, schema, totals."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixrt.cli.chat.client import AnswerStats, ChatClient, ChatError, Piece

MAX_CONTINUATION = 200
"""Tokens after a text where no limit is given: few models without a chat template end by themselves."""


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
        self.messages: list[dict[str, str]] = []
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
        self.messages.append({"role": "user", "content": question})
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
