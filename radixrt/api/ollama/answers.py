"""Turns the chunks of an answer into the objects of Ollama's streams."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from radixrt.api.responses import explanation_extras, structured_extras
from radixrt.messages.answers import AnswerChunk, AnswerReport
from radixrt.messages.message import ToolCall

_NS = 1e9


class Answer:
    """The objects of one answer: each has the text that is new, the last one the numbers.

    Args:
        model: its name.
        in_message: the text is in a ``message``, as of ``/api/chat``; else in ``response``.
    """

    def __init__(self, model: str, in_message: bool) -> None:
        self._model = model
        self._in_message = in_message
        self._calls: list[dict[str, Any]] = []
        """Calls that may go on."""

    def objects(
        self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]
    ) -> Iterator[dict[str, Any]]:
        """The objects that a chunk adds.

        Args:
            logprobs: JSON of each of its tokens, if the request asks for it.
        """
        done = chunk.finish_reason is not None
        for call in chunk.tool_calls:
            self._add(call)
        complete = self._take_calls(all_of_them=done)
        if not (chunk.text or chunk.reasoning or complete or logprobs or done):
            return
        body = self._object(chunk.text, chunk.reasoning, complete)
        if logprobs:
            body["logprobs"] = logprobs
        if done:
            body |= {"done": True, **_numbers(chunk.report), **structured_extras(chunk.report)}
            body |= explanation_extras(chunk.report)
        yield body

    def loaded(self, *, unloads: bool) -> dict[str, Any]:
        """The answer to a request without a prompt, which loads the model, or unloads it."""
        reason = "unload" if unloads else "load"
        return self._object("", "", []) | {"done": True, "done_reason": reason}

    def nothing(self) -> dict[str, Any]:
        """An object that adds nothing, for pauses."""
        return self._object("", "", [])

    def _object(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"content" if self._in_message else "response": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        body = {"message": {"role": "assistant", **message}} if self._in_message else message
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **body, "done": False}

    def _add(self, call: ToolCall) -> None:
        if call.name:
            self._calls.append({"name": call.name, "arguments": ""})
        self._calls[-1]["arguments"] += call.arguments

    def _take_calls(self, all_of_them: bool) -> list[dict[str, Any]]:
        """The calls that are complete: a call goes on until the next one begins."""
        count = len(self._calls) if all_of_them else max(0, len(self._calls) - 1)
        taken, self._calls = self._calls[:count], self._calls[count:]
        calls = []
        for call in taken:
            try:
                arguments = orjson.loads(call["arguments"] or "{}")
            except orjson.JSONDecodeError:
                continue  # cut off by num_predict
            calls.append({"function": {"name": call["name"], "arguments": arguments}})
        return calls


def _numbers(report: AnswerReport) -> dict[str, Any]:
    """The counts of tokens, and durations in nanoseconds."""
    generating_s = max(0.0, report.total_s - report.queued_s - report.prefill_s)
    return {
        "done_reason": report.finish_reason,
        "total_duration": int(report.total_s * _NS),
        "load_duration": 0,
        "prompt_eval_count": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "prompt_eval_duration": int(report.prefill_s * _NS),
        "eval_count": report.output_tokens,
        "eval_duration": int(generating_s * _NS),
    }
