"""The offline door: the same processes as a server, in reach of one Python program."""

import asyncio
import dataclasses
import itertools
import os
import queue
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Unpack, overload

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from radixrt.background_engine import BackgroundEngine
from radixrt.config import DEMO_MODEL, ServerConfig
from radixrt.constrained.grammar import Unenforced
from radixrt.constrained.requests import ConstraintKeywords, check_sampling, from_keywords
from radixrt.constrained.spec import Spec
from radixrt.errors import ConfigError, EngineDiedError, RequestError
from radixrt.launch import prepare
from radixrt.messages import (
    AnswerChunk,
    AnswerTimes,
    ChatPrompt,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Prompt,
    PromptInfo,
    SchedulerStats,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    pack_ids,
    unpack_ids,
)
from radixrt.nesting import check_depth
from radixrt.sampling_params import SamplingParams

PromptLike = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[dict[str, Any]]
"""Messages, each with a role and content."""

MAX_CONCURRENT_REQUESTS = 2048
"""Requests that :meth:`LLM.generate` has under way at once; the others wait here."""


@dataclass(frozen=True)
class Answer:
    """One of the ``n`` answers to a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    times: AnswerTimes | None = None
    reasoning: str = ""
    """The thought before the answer (with ``reasoning_parser``, in chats)."""
    unenforced: tuple[Unenforced, ...] = ()
    """With ``strict=False``: what the answer was not held to."""
    violation: str | None = None
    """How it breaks that, if it does."""
    retries: int = 0
    """How often a part of it was taken back because a check found it invalid."""


@dataclass(frozen=True)
class Output:
    """What came of one prompt."""

    num_prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the radix tree."""
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first answer."""
        return self.answers[0].finish_reason


class LLM:
    """A model and the engine around it, until :meth:`close`; best used as a context manager.

    Example::

        with LLM("path/to/checkpoint") as llm:
            output = llm.generate("Once upon a time", SamplingParams(max_tokens=20))
            print(output.text, output.cached_tokens)

    Args:
        model_path: folder of a Hugging Face checkpoint, or a hub id.
        settings: any field of :class:`radixrt.config.ServerConfig`, such as ``page_size=1``.

    Raises:
        ConfigError: a setting, the checkpoint or the machine makes it impossible to start.
    """

    def __init__(self, model_path: str = DEMO_MODEL, **settings: Any) -> None:
        known = {setting.name for setting in dataclasses.fields(ServerConfig)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(
                f"LLM has no setting {', '.join(unknown)}. It takes those of `radixrt serve`, with underscores, "
                "such as page_size=1."
            )
        config = ServerConfig(model_path=model_path, **{"log_level": "warning", **settings})
        self._engine = BackgroundEngine(prepare(config))
        self.config = config
        self.info: EngineInfo = self._engine.info
        self._new_id = itertools.count()
        # An LLM that is forgotten, or lives to the end of the program, leaves no process behind.
        self._finalizer = weakref.finalize(self, self._engine.close)

    # ------------------------------------------------------------ generation

    @overload
    def generate(self, prompts: str, *args: Any, **kwargs: Any) -> Output: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[int], *args: Any, **kwargs: Any) -> Output: ...
    @overload
    def generate(
        self, prompts: Sequence[PromptLike], *args: Any, **kwargs: Any
    ) -> list[Output]: ...
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        progress: bool = True,
        **constraint: Unpack[ConstraintKeywords],
    ) -> Output | list[Output]:
        """Answer prompts, all at once.

        Args:
            prompts: text or token ids, one or many.
            sampling_params: for all prompts, or one for each; by default those of the checkpoint's
                generation_config.json.
            cache_salt: prefixes are shared only among requests with the same salt.
            progress: show a progress bar (only for many prompts).
            constraint: what all answers are held to, one of: ``schema`` (a JSON schema as a dict or its text, or a
                type such as a pydantic model; with ``strict=False`` as far as it can be enforced), ``regex``,
                ``choices`` (a list of texts), ``grammar`` (EBNF or Lark), ``structured`` (any constraint of
                :mod:`radixrt.constrained.spec`).

        Returns:
            An :class:`Output` for one prompt, a list of them for many, in their order.

        Raises:
            RequestError: a prompt or setting is invalid; nothing goes on running then.
            EngineDiedError: a process of the engine ended.
        """
        single = isinstance(prompts, str) or (
            isinstance(prompts, Sequence | np.ndarray)
            and len(prompts) > 0
            and isinstance(prompts[0], Integral)
        )
        many: Sequence[Any] = [prompts] if single else _list_of(prompts, "prompts")  # type: ignore[list-item]
        outputs = self._answer(
            [_prompt(p) for p in many],
            sampling_params,
            cache_salt,
            progress and not single,
            from_keywords(constraint),
        )
        return outputs[0] if single else outputs

    @overload
    def chat(self, messages: Conversation, *args: Any, **kwargs: Any) -> Output: ...
    @overload
    def chat(self, messages: Sequence[Conversation], *args: Any, **kwargs: Any) -> list[Output]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        cache_salt: str = "",
        progress: bool = True,
        **constraint: Unpack[ConstraintKeywords],
    ) -> Output | list[Output]:
        """Like :meth:`generate`, for one conversation or many, rendered by the model's chat template."""
        conversations = _list_of(messages, "messages")
        single = len(conversations) > 0 and isinstance(conversations[0], dict)
        many: Sequence[Any] = [conversations] if single else conversations
        for conversation in many:
            if not all(isinstance(m, dict) for m in _list_of(conversation, "messages")):
                raise RequestError(
                    "A conversation is a list of messages, each a dict with role and content."
                )
        check_depth([*many, tools, template_kwargs], "messages")
        prompts = [
            ChatPrompt(messages=list(m), tools=tools, template_kwargs=template_kwargs) for m in many
        ]
        outputs = self._answer(
            prompts,
            sampling_params,
            cache_salt,
            progress and not single,
            from_keywords(constraint),
        )
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: PromptLike | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        **constraint: Unpack[ConstraintKeywords],
    ) -> Iterator[AnswerChunk]:
        """Yield the pieces of the answers to one prompt (or conversation) as they come.

        Leaving the loop early aborts the request.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        wire_prompt: Prompt = ChatPrompt(messages=list(prompt)) if is_chat else _prompt(prompt)  # type: ignore[arg-type]
        request = self._request(
            wire_prompt,
            sampling_params or self.default_sampling_params(),
            cache_salt,
            from_keywords(constraint),
            stream=True,
        )
        chunks: queue.SimpleQueue[AnswerChunk | BaseException | None] = queue.SimpleQueue()
        source = self._engine.client.generate(request)
        task = self._engine.submit(_forward(source, chunks))
        try:
            while (chunk := chunks.get()) is not None:
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
        finally:
            task.cancel()

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's authors recommend."""
        return SamplingParams(**self.info.default_sampling)

    # ------------------------------------------------------------ the engine

    @property
    def background(self) -> BackgroundEngine:
        """The processes, for code that makes requests of its own."""
        return self._engine

    def flush_cache(self) -> int:
        """Empty the radix tree of what no running request uses; returns the number of pages freed."""
        return self._engine.run(self._engine.client.flush_cache())

    def stats(self, *, check_invariants: bool = False) -> SchedulerStats:
        """Counters of the scheduler."""
        return self._engine.run(self._engine.client.stats(check_invariants))

    def close(self) -> None:
        """Stop all processes. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        cache_salt: str,
        structured: Spec | None,
        *,
        stream: bool = False,
    ) -> GenerateRequest:
        check_sampling(structured, sampling)
        thinks = isinstance(prompt, ChatPrompt) and self.config.reasoning_parser != "none"
        return GenerateRequest(
            request_id=f"llm-{os.getpid()}-{next(self._new_id)}",
            prompt=prompt,
            sampling=sampling.validate(self.info.vocab_size),
            stream=stream,
            cache_salt=cache_salt,
            structured=structured,
            parse_reasoning=self.config.reasoning_parser if thinks else "",
        )

    def _answer(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
        progress: bool,
        structured: Spec | None,
    ) -> list[Output]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        each = (
            [sampling_params] * len(prompts)
            if isinstance(sampling_params, SamplingParams)
            else sampling_params
        )
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(each)} sampling_params; give one or as many."
            )
        requests = [
            self._request(p, s, cache_salt, structured) for p, s in zip(prompts, each, strict=True)
        ]
        columns = (TextColumn("Answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress, transient=True) as bar:
            return self._engine.run(self._gather(requests, bar))

    async def _gather(self, requests: Sequence[GenerateRequest], bar: Progress) -> list[Output]:
        task = bar.add_task("", total=len(requests))
        room = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

        async def answer(request: GenerateRequest) -> Output:
            async with room:
                chunks = [chunk async for chunk in self._engine.client.generate(request)]
            bar.advance(task)
            return _output(chunks)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(request)) for request in requests]
        except* (RequestError, EngineDiedError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


async def _forward(source: AsyncIterator[AnswerChunk], target: queue.SimpleQueue) -> None:
    """Move chunks to another thread; errors too, then None for the end."""
    try:
        async for chunk in source:
            target.put(chunk)
        target.put(None)
    except Exception as error:
        target.put(error)
    finally:
        await source.aclose()  # type: ignore[attr-defined]


def _list_of(values: Any, name: str) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, not {type(values).__name__}.", param=name)
    return list(values)


def _prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    ids = np.asarray(prompt if isinstance(prompt, Sequence | np.ndarray) else None)
    if isinstance(prompt, bytes) or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("A prompt must be text or a list of token ids.", param="prompts")
    if ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**31:
        raise RequestError(
            "The prompt holds a token id that is no 32-bit integer.", param="prompts"
        )
    return TokenPrompt(pack_ids(ids))


def _output(chunks: list[AnswerChunk]) -> Output:
    """Put the answers of a request that did not stream together; each came as one chunk."""
    chunks.sort(key=lambda chunk: chunk.index)
    prompt: PromptInfo | None = next(
        (chunk.prompt for chunk in chunks if chunk.prompt is not None), None
    )
    return Output(
        num_prompt_tokens=0 if prompt is None else prompt.num_tokens,
        cached_tokens=chunks[0].cached_tokens,
        prompt_logprobs=None if prompt is None else prompt.logprobs,
        answers=[
            Answer(
                text=chunk.text,
                token_ids=unpack_ids(chunk.token_ids).tolist(),
                finish_reason=chunk.finish_reason,
                stop_reason=chunk.stop_reason,
                logprobs=chunk.logprobs,
                times=chunk.times,
                reasoning=chunk.reasoning,
                unenforced=chunk.unenforced,
                violation=chunk.violation,
                retries=chunk.retries,
            )
            for chunk in chunks
        ],
    )
