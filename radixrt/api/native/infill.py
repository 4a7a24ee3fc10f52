"""llama.cpp's ``/infill``: fills the gap between two texts. Editors' plugins use it."""

from typing import Any

import msgspec
from fastapi import Response

from radixrt.api.answering import Formatter, Prepared, respond
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.openai.completions import prepare_completion
from radixrt.api.requests.protocol import CompletionRequest, GenerationFields
from radixrt.api.state import Context
from radixrt.base.errors import RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import FimPrompt


class ExtraFile(msgspec.Struct, kw_only=True):
    """A file beside the one with the gap."""

    text: str
    filename: str = "tmp"


class InfillRequest(GenerationFields, kw_only=True):
    """llama.cpp's fields; those of :class:`GenerationFields` have the same meaning as in
    completions."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    """The beginning of what fills the gap."""
    n_predict: int | None = None
    """``max_tokens``; below 0: as many as fit, which is the default."""
    repeat_penalty: float | None = None
    """``repetition_penalty``."""


routes = Endpoints()


@routes.takes("/infill", InfillRequest)
async def infill(fields: InfillRequest, context: Context) -> Response:
    for name in ("keep", "continue_from"):
        if getattr(fields, name):
            raise RequestError(f"Unknown field {name!r} of /infill; leave it out.", param=name)
    shared: dict[str, Any] = {}
    if fields.n_predict is not None:
        shared["max_tokens"] = fields.n_predict if fields.n_predict >= 0 else None
    if fields.repeat_penalty is not None:
        shared["repetition_penalty"] = fields.repeat_penalty
    files = [(extra.filename, extra.text) for extra in fields.input_extra or ()]
    prompt = FimPrompt(fields.input_prefix, fields.input_suffix, fields.prompt or "", files)
    completion = fields.translated(CompletionRequest, **shared, prompt="")
    prepared = prepare_completion(completion, context, prompt, default_max_tokens=None)
    prepared.check_one_answer()
    return await respond(_Infill(prepared, context.model_name), context)


class _Infill(Formatter):
    def __init__(self, prepared: Prepared, model: str) -> None:
        super().__init__(prepared)
        self._model = model

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> list[dict[str, Any]]:
        return [_object(chunk, self._model)]


def _object(chunk: AnswerChunk, model: str) -> dict[str, Any]:
    report = chunk.report
    body: dict[str, Any] = {"index": 0, "content": chunk.text, "stop": False}
    if report.finish_reason is None:
        return body
    word = report.stop_reason if isinstance(report.stop_reason, str) else ""
    ends = {"stop": "word" if word else "eos", "length": "limit"}
    generating_s = max(0.0, report.total_s - report.queued_s - report.prefill_s)
    return body | {
        "stop": True,
        "model": model,
        "stop_type": ends.get(report.finish_reason, "none"),
        "stopping_word": word,
        "truncated": False,
        "tokens_predicted": report.output_tokens,
        "tokens_evaluated": report.prompt_tokens,
        "tokens_cached": report.cached_tokens,
        "timings": {
            "cache_n": report.cached_tokens,
            "prompt_n": report.prompt_tokens - report.cached_tokens,
            "prompt_ms": report.prefill_s * 1000,
            "predicted_n": report.output_tokens,
            "predicted_ms": generating_s * 1000,
        },
    }
