"""Writes the answers of chat and completions."""

import time
from typing import Any, Generic

from radixrt.api.answering import Fields, Formatter, PreparedRequest
from radixrt.api.http.events import DONE, event
from radixrt.api.responses import Usage, progress_extras, times_extras
from radixrt.api.state import ServerState
from radixrt.messages.answers import AnswerChunk

ChoiceDelta = tuple[dict[str, Any], dict[str, Any]]
"""A choice or, in a stream, a piece of one; and fields of the response beside the choices."""


class OpenAIFormatter(Formatter, Generic[Fields]):
    """Choices with an envelope around them.

    Attributes:
        kind: the response's ``object``.
        kind_of_event: that of an event of its stream.
        hides_output: the request wants no answer; one token is generated and thrown away.
    """

    kind: str
    kind_of_event: str
    hides_output = False
    last = DONE

    def __init__(self, prepared: PreparedRequest[Fields], state: ServerState) -> None:
        super().__init__(prepared)
        self.prepared = prepared
        self.fields = prepared.fields
        self._usage = Usage(self.hides_output)
        options = self.fields.stream_options
        explains = prepared.requests[0].options.cache_hints.explain
        self._ends_with_usage = explains or bool(options and options.include_usage)
        self._always_has_usage = bool(options and options.continuous_usage_stats)
        self._envelope = {
            "id": prepared.id,
            "object": self.kind_of_event if prepared.streams else self.kind,
            "created": int(time.time()),
            "model": state.config.model_name,
            "system_fingerprint": state.fingerprint,
        }

    def encoded(self, part: ChoiceDelta) -> bytes:
        choice, beside = part
        return event(self._piece([choice]) | beside)

    def end(self) -> bytes:
        if not (self._streams and self._ends_with_usage):
            return super().end()
        return event(self._piece([]) | self._usage.explanation()) + DONE

    def whole(self, parts: list[ChoiceDelta]) -> dict[str, Any]:
        choices = sorted((choice for choice, _ in parts), key=lambda choice: choice["index"])
        body: dict[str, Any] = {**self._envelope, "choices": choices}
        for _, beside in parts:
            body |= beside
        return body | self._usage.explanation() | {"usage": self._usage.as_json()}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        piece = {**self._envelope, "choices": choices}
        if self._always_has_usage or self._ends_with_usage:
            has_usage = self._always_has_usage or not choices
            piece["usage"] = self._usage.as_json() if has_usage else None
        return piece

    def progress(
        self, prompt_index: int, chunk: AnswerChunk, choice: dict[str, Any]
    ) -> ChoiceDelta:
        """The event for a chunk with the progress of a prompt, with an empty ``choice``."""
        assert chunk.progress is not None
        index = prompt_index * self.prepared.requests[0].sampling.n
        empty = {"index": index, **choice, "logprobs": None, "finish_reason": None}
        return empty, progress_extras(chunk.progress)

    def beside_first(
        self, chunk: AnswerChunk, text: str, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Record (a piece of) the first answer; returns the fields of the response beside its
        choices."""
        times = times_extras(chunk.report) if self.fields.return_times else {}
        return times | self.prepared.record(chunk, text, calls)
