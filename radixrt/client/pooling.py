"""Runs prompts that give numbers in place of text: vectors, classes, and scores of pairs of texts.

The endpoints of ``radixrt/api/embeddings``, ``LLM.embed`` and ``LLM.score_pairs`` use it.
"""

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RequestError, wrong
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.client.engine_client import RunRequests
from radixrt.messages.answers import AnswerReport, EngineInfo
from radixrt.messages.ids import num_ids, pack_ids, unpack_ids
from radixrt.messages.requests import (
    DEFAULT_POOLING,
    GenerateRequest,
    PairPrompt,
    PoolingInfo,
    PoolingRequest,
    Prompt,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)

Vector = NDArray[np.float32]  # [numbers of a prompt]


class Pooled(NamedTuple):
    """The numbers of prompts that were computed together."""

    id: str
    """The id of their request."""
    vectors: list[Vector]
    """One a prompt."""
    reports: list[AnswerReport]

    @property
    def prompt_tokens(self) -> int:
        return sum(report.prompt_tokens for report in self.reports)

    @property
    def cached_tokens(self) -> int:
        return sum(report.cached_tokens for report in self.reports)


class Judged(NamedTuple):
    """The scores of pairs; a higher one means that the document fits the query better."""

    scores: list[float]
    run: Pooled


Compute = Callable[[list[Prompt], PoolingRequest], Coroutine[Any, Any, Pooled]]
"""Runs prompts, each of which gives the same kind of numbers."""


async def run_pooled(
    run: RunRequests,
    request_id: str,
    prompts: Sequence[Prompt],
    options: RequestOptions,
    pool: PoolingRequest = DEFAULT_POOLING,
) -> Pooled:
    """Compute prompts.

    Args:
        options: their sampling settings are not used.
        pool: what every prompt gives.

    Raises:
        RequestError: a prompt was refused or dropped.
        EngineDiedError: the engine ended.
    """
    options = msgspec.structs.replace(options, sampling=PREFILL_ONLY, pool=pool)
    chunks = await run(
        [
            GenerateRequest(
                request_id=f"{request_id}-{i}", group_id=request_id, prompt=prompt, options=options
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    if any(chunk.finish_reason == "abort" for chunk in chunks):
        raise RequestError("The request was dropped before all of it was computed.", status=408)
    vectors = [np.frombuffer(chunk.vector, dtype="<f4") for chunk in chunks]
    return Pooled(request_id, vectors, [chunk.report for chunk in chunks])


async def judge(
    compute: Compute,
    info: EngineInfo,
    pairs: Sequence[tuple[str, str]],
    *,
    instruction: str = "",
    max_tokens: int | None = None,
    max_document_tokens: int | None = None,
) -> Judged:
    """The scores of pairs of a query and a document: by a cross-encoder, by a decoder's logits for
    yes and no, or by the cosine of two vectors.

    Args:
        instruction: for decoders; "": their usual one.
        max_tokens: to which the documents of longer pairs, or longer texts for a cosine, are cut.
        max_document_tokens: to which longer documents are cut.

    Raises:
        RequestError: the model judges no pairs, or a text is empty or too long.
    """
    pooling = info.pooling
    if pooling is not None and pooling.task == "embed":
        return await _by_cosine(compute, pairs, max_tokens, max_document_tokens)
    if pooling is not None and pooling.size != 1:
        raise RequestError(
            f"This server's classifier has {pooling.size} classes and gives no score of a pair; use /classify."
        )
    pool = DEFAULT_POOLING if pooling is not None else PoolingRequest(info.score_tokens)
    if pooling is None and not pool.logits_of:
        raise RequestError(
            "This server's model can't judge pairs of texts: its vocabulary has no single tokens for yes and no."
        )
    prompts: list[Prompt] = [
        PairPrompt(
            query,
            document,
            instruction=instruction,
            max_tokens=max_tokens,
            max_document_tokens=max_document_tokens,
        )
        for query, document in pairs
    ]
    run = await compute(prompts, pool)
    if pooling is not None:
        return Judged([float(vector[0]) for vector in run.vectors], run)
    return Judged([_probability(*vector.tolist()) for vector in run.vectors], run)


def paired(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text beside each of many, or texts side by side.

    Raises:
        RequestError: a text is empty, or the lists have different lengths.
    """
    left, right = ([one] if isinstance(one, str) else list(one) for one in (first, second))
    for name, texts in (("text_1", left), ("text_2", right)):
        if not texts or "" in texts:
            raise wrong(name, "is empty, or holds an empty text")
    count = max(len(left), len(right))
    if {len(left), len(right)} - {1, count}:
        raise RequestError(
            f"text_1 has {len(left)} texts and text_2 {len(right)}: give one of either, or as many of both.",
            param="text_2",
        )
    left, right = (texts * (count // len(texts)) for texts in (left, right))
    return list(zip(left, right, strict=True))


def cut(prompt: Prompt, max_tokens: int | None) -> Prompt:
    """A text or token ids, cut at the end to a number of tokens; None: as it is, and refused if it
    is too long."""
    if max_tokens is None:
        return prompt
    if isinstance(prompt, TextPrompt):
        return msgspec.structs.replace(prompt, max_tokens=max_tokens)
    if isinstance(prompt, TokenPrompt) and num_ids(prompt.token_ids) > max_tokens:
        return TokenPrompt(pack_ids(unpack_ids(prompt.token_ids)[:max_tokens]))
    return prompt


def max_input_tokens(asked: int | None, info: EngineInfo) -> int | None:
    """The limit to which inputs are cut: ``truncate_prompt_tokens``.

    Raises:
        RequestError: it is 0 or less, other than -1, or more than the context length.
    """
    longest = min(info.context_length, info.kv_pool_tokens)
    if asked is None or asked == -1:
        return asked and longest
    if not 1 <= asked <= longest:
        raise wrong("truncate_prompt_tokens", f"must be -1 or from 1 to {longest}, not {asked}")
    return asked


def check_embeds(info: PoolingInfo | None, dimensions: int | None) -> None:
    """Raises RequestError if the model is a classifier, or its vectors cannot be cut to this
    length."""
    if info is None:
        return  # the tokenizer process refuses the prompts
    if info.task != "embed":
        raise RequestError(
            "This server's model is a classifier and gives no vectors; use /classify."
        )
    if dimensions is None:
        return
    if not 1 <= dimensions <= info.size or (info.dimensions and dimensions not in info.dimensions):
        allowed = ", ".join(map(str, info.dimensions)) or f"from 1 to {info.size}"
        raise wrong("dimensions", f"must be {allowed} with this model, not {dimensions}")


def shortened(vector: Vector, dimensions: int, normalize: bool) -> Vector:
    """The first ``dimensions`` numbers of a vector, again of length 1 if that was."""
    vector = vector[:dimensions]
    return unit(vector) if normalize else vector


def unit(vector: Vector) -> Vector:
    """A vector divided by its length."""
    length = max(float(np.linalg.norm(vector)), 1e-12)
    return (vector / length).astype(np.float32)


def _probability(relevant: float, not_relevant: float = 0.0) -> float:
    """The probability of the first of two logits (Qwen3-Reranker). One logit alone is its own
    log-odds."""
    return 1 / (1 + math.exp(min(not_relevant - relevant, 700.0)))


async def _by_cosine(
    compute: Compute,
    pairs: Sequence[tuple[str, str]],
    max_tokens: int | None,
    max_document_tokens: int | None,
) -> Judged:
    """The cosine of the texts' vectors. A text of several pairs is computed once."""
    limits = [limit for limit in (max_tokens, max_document_tokens) if limit is not None]
    limit_of = {document: min(limits, default=None) for _, document in pairs}
    limit_of |= {query: max_tokens for query, _ in pairs}
    prompts: list[Prompt] = [TextPrompt(text, max_tokens=limit) for text, limit in limit_of.items()]
    run = await compute(prompts, DEFAULT_POOLING)
    vectors = {text: unit(one) for text, one in zip(limit_of, run.vectors, strict=True)}
    scores = [float(np.dot(vectors[query], vectors[document])) for query, document in pairs]
    return Judged(scores, run)
