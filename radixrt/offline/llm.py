"""``LLM``: the engine in a Python program, with the same processes as a server but without HTTP."""

import difflib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Unpack, overload

from msgspec.structs import asdict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from radixrt.base.config import DEMO_MODEL, SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.translation import translated
from radixrt.client import warming
from radixrt.client.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.client.pooling import (
    Compute,
    check_embeds,
    cut,
    judge,
    max_input_tokens,
    paired,
    run_pooled,
    shortened,
)
from radixrt.client.warming import DEFAULT_PIN_S, Warmed
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.requests import ConstraintKeywords, from_keywords
from radixrt.kv.cache_hint import CacheHint
from radixrt.kv.reading import CacheStats
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import AnswerChunk, EngineInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import (
    FlushCacheCall,
    LoadAdapterCall,
    ReleaseCacheCall,
    StatsCall,
    UnloadAdapterCall,
)
from radixrt.messages.requests import (
    DEFAULT_POOLING,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    RequestOptions,
    TextPrompt,
)
from radixrt.messages.stats import SchedulerStats
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.offline.outputs import Answer, Embedding, Output, PinnedPrompt, output_from_chunks
from radixrt.offline.prompt_forms import (
    Messages,
    PromptLike,
    chat_of,
    is_one_prompt,
    list_of,
    prompt_of,
    prompt_or_chat,
)
from radixrt.offline.requests import RequestMaker, hinted_options
from radixrt.supervisor.launch import prepare

__all__ = ["LLM", "Answer", "Embedding", "Output"]

MAX_CONCURRENT_REQUESTS = 2048
"""Requests that :meth:`LLM.generate` has in flight at once; the others wait here."""


class LLM:
    """A model and the engine around it, until :meth:`close`; best used as a context manager.

    Example::

        with LLM("path/to/checkpoint") as llm:
            output = llm.generate("Once upon a time", SamplingParams(max_tokens=20))
            print(output.text, output.cached_tokens)

    Args:
        model_path: folder of a Hugging Face checkpoint, a hub id, a GGUF file, or
            ``hf:USER/REPO:QUANTIZATION``.
        settings: any field of :class:`radixrt.base.config.ServerConfig`, such as ``page_size=1``;
            those of vLLM's ``LLM``, such as ``max_model_len``, are understood.

    Raises:
        ConfigError: a setting, the checkpoint or the machine makes it impossible to start.
    """

    def __init__(self, model_path: str = DEMO_MODEL, **settings: Any) -> None:
        settings = translated(settings, SETTINGS)
        if unknown := sorted(settings.keys() - SETTINGS.keys()):
            near = difflib.get_close_matches(unknown[0], SETTINGS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"LLM has no setting {', '.join(unknown)}.{hint} It takes those of `radixrt serve`, with underscores, "
                "such as page_size=1."
            )
        # a program waits for its answers
        defaults: dict[str, Any] = {
            "log_level": "warning",
            "max_queue_seconds": 0,
            "disable_shared_answers": True,  # a program that asks twice means it
        }
        config = prepare(ServerConfig(**{"model_path": model_path} | defaults | settings))
        self._engine = BackgroundEngine(config)
        self.config = config
        self.info: EngineInfo = self._engine.info
        self._requests = RequestMaker(config, self._engine.client, self.info)
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
        cache: CacheHint | None = None,
        adapter: str = "",
        progress: bool = True,
        **constraint: Unpack[ConstraintKeywords],
    ) -> Output | list[Output]:
        """Answer prompts, all at once.

        Args:
            prompts: text or token ids, one or many.
            sampling_params: for all prompts, or one for each; by default those of the checkpoint's
                generation_config.json, with at most 256 tokens of the answer to a text.
            cache_salt: prefixes are shared only among requests with the same salt.
            cache: hint about the future use of these prompts' KV; never changes an answer.
            adapter: name of a LoRA adapter of the setting ``lora``, or of :meth:`load_adapter`;
                empty: the base model.
            progress: show a progress bar (only for many prompts).
            constraint: on all answers, one of: ``schema`` (a JSON schema as a dict or its text, or
                a type such as a pydantic model; with ``strict=False`` as far as it can be
                enforced), ``regex``, ``choices`` (a list of texts), ``grammar`` (EBNF or Lark),
                ``structured`` (any constraint of :mod:`radixrt.constrained.constraint`).

        Returns:
            An :class:`Output` for one prompt, a list of them for many, in their order.

        Raises:
            RequestError: a prompt or setting is invalid; nothing goes on running then.
            EngineDiedError: a process of the engine ended.
        """
        single = is_one_prompt(prompts)
        many: Sequence[Any] = [prompts] if single else list_of(prompts, "prompts")  # type: ignore[list-item]
        prompts_of_all = [prompt_of(p) for p in many]
        options = self._requests.options(cache_salt, cache, adapter)
        structured = from_keywords(constraint)
        return self._answer(prompts_of_all, single, sampling_params, options, structured, progress)

    @overload
    def chat(self, messages: Messages, *args: Any, **kwargs: Any) -> Output: ...
    @overload
    def chat(self, messages: Sequence[Messages], *args: Any, **kwargs: Any) -> list[Output]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        cache_salt: str = "",
        cache: CacheHint | None = None,
        adapter: str = "",
        progress: bool = True,
        **constraint: Unpack[ConstraintKeywords],
    ) -> Output | list[Output]:
        """Like :meth:`generate`, for one chat or many, rendered by the model's chat template."""
        chats = list_of(messages, "messages")
        single = len(chats) > 0 and isinstance(chats[0], dict)
        many: Sequence[Any] = [chats] if single else chats
        prompts = [chat_of(chat, tools, template_kwargs) for chat in many]
        options = self._requests.options(cache_salt, cache, adapter)
        structured = from_keywords(constraint)
        return self._answer(prompts, single, sampling_params, options, structured, progress)

    def stream(
        self,
        prompt: PromptLike | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        cache: CacheHint | None = None,
        adapter: str = "",
        **constraint: Unpack[ConstraintKeywords],
    ) -> Iterator[AnswerChunk]:
        """Yield the pieces of the answers to one prompt (or chat) as they are generated.

        Leaving the loop early aborts the request.
        """
        wire_prompt = prompt_or_chat(prompt)
        request = self._requests.generate(
            wire_prompt,
            sampling_params or self._requests.default_sampling(wire_prompt, constraint),
            self._requests.options(cache_salt, cache, adapter),
            from_keywords(constraint),
            stream=True,
        )
        yield from self._engine.iterate(self._engine.client.generate(request))

    def default_sampling_params(self) -> SamplingParams:
        """The sampling settings of the checkpoint's generation_config.json."""
        return SamplingParams(**self.info.default_sampling)

    def score(
        self,
        prompt: str | Messages,
        choices: Sequence[str],
        *,
        unconditional: bool = False,
        continue_final_message: bool = False,
        cache_salt: str = "",
        cache: CacheHint | None = None,
        adapter: str = "",
    ) -> ChoiceScores:
        """Log-probabilities of several texts behind a prompt; all are scored in one batch, and the
        prompt is computed once.

        Args:
            prompt: text, or messages: then each choice is the assistant's next message.
            choices: the texts.
            unconditional: score them without the prompt, too.
            continue_final_message: the choices continue the last message, which is the assistant's.

        Raises:
            RequestError: the prompt is invalid, or there is nothing to score.
        """
        wire_prompt = prompt_or_chat(prompt, continue_final_message=continue_final_message)
        assert isinstance(wire_prompt, TextPrompt | ChatPrompt)
        question = ChoiceQuestion(wire_prompt, choices, unconditional)
        client, options = self._engine.client, self._requests.options(cache_salt, cache, adapter)
        return self._engine.run(
            score_choices(client, client.run, self._requests.new_id(), question, options)
        )

    # ------------------------------------------------------------ numbers

    @overload
    def embed(self, prompts: str, *args: Any, **kwargs: Any) -> Embedding: ...  # type: ignore[overload-overlap]
    @overload
    def embed(self, prompts: Sequence[int], *args: Any, **kwargs: Any) -> Embedding: ...
    @overload
    def embed(
        self, prompts: Sequence[PromptLike], *args: Any, **kwargs: Any
    ) -> list[Embedding]: ...
    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> Embedding | list[Embedding]:
        """The vectors of an embedding model, computed in one batch.

        Args:
            prompts: text or token ids, one or many.
            dimensions: length to which the vectors are cut, for models that were trained for it
                (Matryoshka).
            truncate_prompt_tokens: longer prompts are cut at their end to this number of tokens;
                -1: to the context length. None: they are refused.
            cache_salt: as in :meth:`generate`.

        Raises:
            RequestError: a prompt is invalid, or the model gives no vectors, or none of this
                length.
        """
        check_embeds(self.info.pooling, dimensions)
        single = is_one_prompt(prompts)
        limit = max_input_tokens(truncate_prompt_tokens, self.info)
        many: Sequence[Any] = [prompts] if single else list_of(prompts, "prompts")  # type: ignore[list-item]
        run = self._engine.run(
            self._computing(cache_salt)(
                [cut(prompt_of(one), limit) for one in many], DEFAULT_POOLING
            )
        )
        vectors = run.vectors
        if dimensions is not None and self.info.pooling is not None:
            vectors = [shortened(one, dimensions, self.info.pooling.normalized) for one in vectors]
        found = [
            Embedding(vector, report.prompt_tokens, report.cached_tokens)
            for vector, report in zip(vectors, run.reports, strict=True)
        ]
        return found[0] if single else found

    def score_pairs(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str = "",
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[float]:
        """Scores of pairs of a query and a document: a higher one means that the document fits the
        query better.

        Args:
            text_1: a query, or one for each document.
            text_2: a document, or many.
            instruction: for decoders: the task by which a pair is judged.
            truncate_prompt_tokens: documents are cut so that the pair fits into this number of
                tokens; -1: into the context.
            cache_salt: as in :meth:`generate`.

        Raises:
            RequestError: a text is empty or too long, or the model judges no pairs.
        """
        judging = judge(
            self._computing(cache_salt),
            self.info,
            paired(text_1, text_2),
            instruction=instruction,
            max_tokens=max_input_tokens(truncate_prompt_tokens, self.info),
        )
        return self._engine.run(judging).scores

    # ------------------------------------------------------------ the KV cache

    def warm(
        self,
        prompt: PromptLike | Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        cache_salt: str = "",
        cache: CacheHint | None = None,
    ) -> Warmed:
        """Compute a prompt's KV without an answer, so that requests which begin with it find it.

        Args:
            prompt: text, token ids or messages; the template adds no generation prompt.
            tools: for the chat template.
            template_kwargs: for the chat template.
            cache_salt: of the requests to come.
            cache: as in :meth:`generate`.

        Raises:
            RequestError: the prompt is invalid.
        """
        wire_prompt = prompt_or_chat(prompt, tools, template_kwargs, add_generation_prompt=False)
        run, options = self._engine.client.run, hinted_options(cache_salt, cache)
        return self._engine.run(warming.warm(run, self._requests.new_id(), wire_prompt, options))

    def pin(
        self,
        prompt: PromptLike | Messages,
        *,
        ttl_s: float = DEFAULT_PIN_S,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        cache_salt: str = "",
    ) -> PinnedPrompt:
        """Warm a prompt and keep its KV from eviction, for ``ttl_s`` seconds at most::

            with llm.pin(document, ttl_s=600):
                answers = llm.generate([document + question for question in questions])

        Raises:
            RequestError: the prompt is invalid, or too much is pinned already.
        """
        wire_prompt = prompt_or_chat(prompt, tools, template_kwargs, add_generation_prompt=False)
        client = self._engine.client
        pinned = self._engine.run(
            warming.pin(
                client,
                client.run,
                self._requests.new_id(),
                wire_prompt,
                RequestOptions(root=CacheRoot(salt=cache_salt)),
                ttl_s=ttl_s,
            )
        )
        return PinnedPrompt(**asdict(pinned), release_lease=self.release)

    def release(
        self, lease: str | None = None, *, session: str | None = None, cache_salt: str = ""
    ) -> int:
        """End a lease, or a session, whose KV is then evicted first.

        Returns:
            The number of tokens of the lease or the session.

        Raises:
            RequestError: not exactly one of the two is given, or the lease is unknown.
        """
        if (lease is None) == (session is None):
            raise RequestError("Give the lease to end, or the session that has ended: one of them.")
        call = ReleaseCacheCall(
            lease=lease or "", session=session or "", root=CacheRoot(salt=cache_salt)
        )
        return self._engine.run(self._engine.client.call(call))

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load a LoRA adapter from a folder; the settings ``lora`` or ``max_loras`` make places for
        adapters.

        Raises:
            RequestError: it cannot be served, the name is in use, or there is no place.
        """
        return self._engine.run(self._engine.client.call(LoadAdapterCall(name=name, path=path)))

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Let a LoRA adapter go, when the last request that uses it has ended.

        Raises:
            RequestError: there is none of this name.
        """
        return self._engine.run(self._engine.client.call(UnloadAdapterCall(name=name)))

    def cache_stats(self) -> CacheStats:
        """The use of the KV cache, and its hit rate."""
        return CacheStats.from_scheduler(self.stats(), self.info.page_size)

    # ------------------------------------------------------------ the engine

    @property
    def background(self) -> BackgroundEngine:
        """The engine, for code that makes requests of its own."""
        return self._engine

    def flush_cache(self) -> int:
        """Empty the radix tree of all KV that no running request uses; returns the number of pages
        freed."""
        return self._engine.run(self._engine.client.call(FlushCacheCall()))

    def stats(self, *, check_invariants: bool = False) -> SchedulerStats:
        """Counters of the scheduler."""
        return self._engine.run(self._engine.client.call(StatsCall(check_invariants)))

    def close(self) -> None:
        """Stop all processes. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _answer(
        self,
        prompts: Sequence[Prompt],
        single: bool,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        constraint: Constraint | None,
        progress: bool,
    ) -> Output | list[Output]:
        if sampling_params is None:
            first = prompts[0] if prompts else None
            sampling_params = self._requests.default_sampling(first, constraint)
        each = sampling_params
        if isinstance(each, SamplingParams):
            each = [each] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(each)} sampling_params; give one or as many."
            )
        both = zip(prompts, each, strict=True)
        requests = [self._requests.generate(p, s, options, constraint) for p, s in both]
        columns = (TextColumn("Answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=single or not progress, transient=True) as bar:
            outputs = self._engine.run(self._gather(requests, bar))
        return outputs[0] if single else outputs

    def _computing(self, cache_salt: str) -> Compute:
        """Computes prompts that give numbers."""
        run = partial(self._engine.client.run, max_concurrency=MAX_CONCURRENT_REQUESTS)
        options = RequestOptions(root=CacheRoot(salt=cache_salt))
        return lambda prompts, pool: run_pooled(
            run, self._requests.new_id(), prompts, options, pool
        )

    async def _gather(self, requests: Sequence[GenerateRequest], bar: Progress) -> list[Output]:
        task = bar.add_task("", total=sum(request.sampling.n for request in requests))
        answers = await self._engine.client.answers(
            requests, MAX_CONCURRENT_REQUESTS, lambda number, answer: bar.advance(task)
        )
        return [output_from_chunks(chunks) for chunks in answers]
