"""JSON of usage, prompts and reports, as the endpoints' responses have them."""

from typing import Any

import msgspec
import orjson

from radixrt.api.logprobs import prompt_logprobs
from radixrt.messages.answers import AnswerChunk, AnswerReport, PromptProgress, ValueEvent
from radixrt.messages.ids import unpack_ids


class Usage:
    """The usage of a request with one or several prompts and answers."""

    def __init__(self, hides_output: bool = False) -> None:
        """
        Args:
            hides_output: output tokens do not count, since the client does not get them.
        """
        self._hides_output = hides_output
        self._reports: dict[tuple[int, int], AnswerReport] = {}

    def add(self, prompt_index: int, chunk: AnswerChunk) -> None:
        self._reports[prompt_index, chunk.index] = chunk.report

    def explanation(self) -> dict[str, Any]:
        """The explanation of the cache misses of the first prompt, once its answer is complete."""
        return explanation_extras(self._reports.get((0, 0), AnswerReport()))

    def as_json(self) -> dict[str, Any]:
        every = self._reports.values()
        # The other answers to a prompt find the first one's KV in the cache.
        first = [report for (_, index), report in self._reports.items() if index == 0]
        prompts = {prompt: report.prompt_tokens for (prompt, _), report in self._reports.items()}
        output_tokens = 0 if self._hides_output else sum(report.output_tokens for report in every)
        details = {
            "cached_tokens": sum(report.cached_tokens for report in first),
            "cache_write_tokens": sum(report.cache_write_tokens for report in first),
        }
        if disk_tokens := sum(report.disk_tokens for report in first):
            details["disk_tokens"] = disk_tokens
        if image_tokens := sum(report.image_tokens for report in first):
            details["image_tokens"] = image_tokens
        usage = usage_json(sum(prompts.values()), output_tokens, details)
        names = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
        usage["completion_tokens_details"] = {
            name: 0 if self._hides_output else sum(getattr(report, name) for report in every)
            for name in names
        }
        if (drafts := self._drafts()) and not self._hides_output:
            usage["completion_tokens_details"]["drafts"] = drafts
        if replayed := sum(report.replayed_tokens for report in every):
            usage["replayed_tokens"] = replayed
        if retries := sum(report.retries for report in every):
            usage["structured_output_retries"] = retries
        return usage

    def _drafts(self) -> dict[str, dict[str, int]]:
        """The verified draft tokens and the accepted ones, by drafter."""
        found: dict[str, dict[str, int]] = {}
        for report in self._reports.values():
            for name, (drafted, accepted) in report.drafts.items():
                one = found.setdefault(name, {"drafted": 0, "accepted": 0})
                one["drafted"] += drafted
                one["accepted"] += accepted
        return found


def usage_json(
    prompt_tokens: int, completion_tokens: int, prompt_details: dict[str, int]
) -> dict[str, Any]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": prompt_details,
    }


def structured_extras(report: AnswerReport) -> dict[str, Any]:
    """The ``structured_output`` object of a complete answer that was not held to all of its
    constraint."""
    if report.finish_reason is None or not (report.unenforced or report.violation):
        return {}
    unenforced = [msgspec.to_builtins(one) for one in report.unenforced]
    return {"structured_output": {"unenforced": unenforced, "violation": report.violation}}


def explanation_extras(report: AnswerReport) -> dict[str, Any]:
    """The ``cache_explanation`` of a complete answer whose request asked for it."""
    explanation = report.cache_explanation
    return {} if explanation is None else {"cache_explanation": msgspec.to_builtins(explanation)}


def receipt_extras(chunk: AnswerChunk) -> dict[str, Any]:
    """The ``receipt`` of a complete answer whose request asked for it."""
    if chunk.receipt is None:
        return {}
    return {"receipt": orjson.Fragment(msgspec.json.encode(chunk.receipt))}


def value_events(chunk: AnswerChunk) -> dict[str, Any]:
    """The ``values`` of a streamed choice; nothing if no value begins or ends in the chunk."""
    return {"values": [_value_event(event) for event in chunk.values]} if chunk.values else {}


def _value_event(event: ValueEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "event": f"value.{event.event}",
        "pointer": event.pointer,
        "type": event.type,
    }
    if event.tool_call is not None:
        fields["tool_call"] = event.tool_call
    if event.text is not None:
        line = event.text.replace("\n", " ").replace("\r", " ")  # an event's data is one line
        fields |= {"value": orjson.Fragment(line), "validated": event.validated}
    return fields


def progress_extras(progress: PromptProgress) -> dict[str, Any]:
    """The ``prompt_progress`` object, as llama.cpp's server has it."""
    return {
        "prompt_progress": {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.seconds * 1e3),
        }
    }


def times_extras(report: AnswerReport) -> dict[str, Any]:
    """The ``times`` object of a complete answer."""
    return {} if report.finish_reason is None else {"times": report.times}


def report_extras(report: AnswerReport, *, times: bool = False) -> dict[str, Any]:
    """All that a complete answer has beyond its text and its usage."""
    found = structured_extras(report) | explanation_extras(report)
    if report.replayed_tokens:
        found["replayed_tokens"] = report.replayed_tokens
    return found | times_extras(report) if times else found


async def prompt_extras(chunk: AnswerChunk, wants_ids: bool) -> dict[str, Any]:
    """Fields beyond OpenAI's about the prompt, where they were asked for."""
    extras: dict[str, Any] = {}
    if chunk.prompt is None:
        return extras
    if wants_ids:
        extras["prompt_token_ids"] = unpack_ids(chunk.prompt.token_ids).tolist()
    if chunk.prompt.logprobs is not None:
        extras["prompt_logprobs"] = await prompt_logprobs(chunk.prompt.logprobs)
    return extras
