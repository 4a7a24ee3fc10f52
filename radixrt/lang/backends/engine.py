"""How does a model inside this process answer a program's calls? Without HTTP, with all that the engine has."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from radixrt.errors import EngineDiedError, RequestError
from radixrt.lang.backends.protocol import (
    DEFAULT_MAX_TOKENS,
    CacheHints,
    Call,
    ChoiceCall,
    Piece,
    Prompt,
    Score,
    Scored,
    ServerTimes,
    ToolCallPiece,
    Usage,
)
from radixrt.lang.background import outcome
from radixrt.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from radixrt.lang.errors import BackendError, BadRequest, ConnectionLost, UnsupportedFeature

if TYPE_CHECKING:
    from radixrt.constrained.spec import Spec
    from radixrt.engine import LLM
    from radixrt.messages.answers import AnswerChunk
    from radixrt.messages.requests import GenerateRequest

Result = TypeVar("Result")


class Engine:
    """A :class:`radixrt.LLM`. It is not closed with the backend: whoever made it closes it."""

    def __init__(self, llm: "LLM") -> None:
        self.name = "The engine in this process"
        self._llm = llm

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        request = self._request(call)
        completion_tokens: dict[int, int] = {}
        usage = Usage()
        have_called: set[int] = set()
        """Answers that call tools."""
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                if chunk.tool_calls:
                    have_called.add(chunk.index)
                completion_tokens[chunk.index] = chunk.num_output_tokens
                if chunk.prompt is not None:
                    usage = Usage(prompt_tokens=chunk.prompt.num_tokens)
                usage = Usage(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=chunk.cached_tokens if chunk.index == 0 else usage.cached_tokens,
                    completion_tokens=sum(completion_tokens.values()),
                )
                yield _piece(chunk, usage, chunk.index in have_called)

    async def score(self, call: ChoiceCall) -> Scored:
        from radixrt.choice_scoring import ChoiceQuestion, score_in_process

        prompt = _wire_prompt(call.prompt, call.continues, ())
        question = ChoiceQuestion(prompt, call.choices, call.unconditional)
        hints = _cache_hints(call.hints)
        client = self._llm.background.client
        found = await self._in_engine(score_in_process(client, question, _new_id(), hints=hints))
        return Scored(
            [
                Score(tuple(score.logprobs), tuple(score.unconditional_logprobs or ()))
                for score in found.scores
            ],
            Usage(
                prompt_tokens=found.prompt_tokens,
                cached_tokens=found.cached_tokens,
                completion_tokens=found.choice_tokens,
            ),
        )

    async def cache_tokens(self) -> int | None:
        return self._llm.info.kv_pool_tokens

    async def programs_ended(self, sessions: Sequence[str]) -> None:
        client = self._llm.background.client
        with contextlib.suppress(BackendError):
            for session in sessions:
                await self._in_engine(client.release_cache(session=session))

    async def pin(self, prefix: Prompt, seconds: float) -> str | None:
        with contextlib.suppress(RequestError, EngineDiedError):
            return (await asyncio.to_thread(self._llm.pin, prefix, ttl_s=seconds)).lease
        return None

    async def unpin(self, lease: str) -> None:
        with contextlib.suppress(BackendError):
            await self._in_engine(self._llm.background.client.release_cache(lease=lease))

    async def close(self) -> None:
        """Nothing of its own is open."""

    async def _in_engine(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something in the engine's event loop. Cancelling this cancels it.

        Raises:
            BackendError: it failed.
        """
        try:
            under_way = self._llm.background.submit(work)
            try:
                return await outcome(under_way)
            finally:
                under_way.cancel()
        except (RequestError, EngineDiedError) as error:
            raise _translated(error) from error

    def _request(self, call: Call) -> "GenerateRequest":
        """Raises:
        BadRequest: the engine could not do it.
        """
        from radixrt.constrained.requests import check_sampling
        from radixrt.messages.requests import ChatPrompt
        from radixrt.sampling_params import SamplingParams

        prompt = _wire_prompt(call.prompt, call.continues, call.tools)
        config, info = self._llm.config, self._llm.info
        settings = dict(info.default_sampling)
        if isinstance(call.prompt, str):
            settings["max_tokens"] = DEFAULT_MAX_TOKENS
        settings |= call.sampling.given()
        if isinstance(settings.get("stop"), str):
            settings["stop"] = (settings["stop"],)
        try:
            sampling = SamplingParams(**settings, n=call.n).validate(info.vocab_size)
            structured = self._spec(call)
            check_sampling(structured, sampling)
        except RequestError as error:
            raise _translated(error) from error
        thinks = isinstance(prompt, ChatPrompt) and not call.continues
        return self._wire_request(
            prompt,
            sampling,
            structured=structured,
            stream=call.stream,
            cache_hints=_cache_hints(call.hints),
            parse_tool_calls=config.tool_call_parser if call.tools else "",
            parse_reasoning=config.reasoning_parser
            if thinks and config.reasoning_parser != "none"
            else "",
        )

    def _spec(self, call: Call) -> "Spec | None":
        """What the answer is held to.

        Raises:
            RequestError: it is not well formed.
            UnsupportedFeature: the model decides between calls of tools and text of a constraint that could look like one.
        """
        from radixrt.constrained.requests import ConstraintKeywords, from_keywords, json_schema
        from radixrt.constrained.tool_calls import FORMATS, Tool, calls, one_call_or_json

        if not call.tools or call.tool_choice == "none":
            keywords: ConstraintKeywords = _constraint_keywords(call.constraint)  # type: ignore[assignment]
            return from_keywords(keywords)
        functions = [tool["function"] for tool in call.tools]
        if call.tool_choice not in (None, "auto", "required"):
            functions = [one for one in functions if one["name"] == call.tool_choice]
        tools = [Tool.of(one["name"], one["parameters"], False, one["name"]) for one in functions]
        written = FORMATS[self._llm.config.tool_call_parser]
        required = call.tool_choice not in (None, "auto")
        if call.constraint is not None and not required:
            if not isinstance(call.constraint, JsonSchema) or not written.opening:
                raise UnsupportedFeature(
                    "tools together with this constraint",
                    self.name,
                    "Use schema=, or leave one of them out.",
                )
            held = json_schema(call.constraint.schema, "schema")
            return one_call_or_json(tools, written, held)
        most = None if call.tool_choice in (None, "auto", "required") else 1
        return calls(tools, written, required=required, most=most)

    def _wire_request(self, prompt: Any, sampling: Any, **fields: Any) -> "GenerateRequest":
        from radixrt.messages.requests import GenerateRequest

        return GenerateRequest(request_id=_new_id(), prompt=prompt, sampling=sampling, **fields)

    async def _chunks(self, request: "GenerateRequest") -> "AsyncGenerator[AnswerChunk, None]":
        """The chunks of an answer, brought over from the engine's event loop. Closing it aborts the request."""
        here = asyncio.get_running_loop()
        arrivals: asyncio.Queue[AnswerChunk | Exception | None] = asyncio.Queue()

        async def bring_over() -> None:
            last: Exception | None = None
            try:
                async with aclosing(engine.client.generate(request)) as chunks:
                    async for chunk in chunks:
                        here.call_soon_threadsafe(arrivals.put_nowait, chunk)
            except (RequestError, EngineDiedError) as error:
                last = _translated(error)
            here.call_soon_threadsafe(arrivals.put_nowait, last)

        engine = self._llm.background
        try:
            work = engine.submit(bring_over())
        except EngineDiedError as error:
            raise _translated(error) from error
        try:
            while (arrival := await arrivals.get()) is not None:
                if isinstance(arrival, Exception):
                    raise arrival
                yield arrival
        finally:
            work.cancel()


def _new_id() -> str:
    return f"lang-{uuid.uuid4().hex}"


def _wire_prompt(prompt: Prompt, continues: bool, tools: Sequence[dict[str, Any]]) -> Any:
    from radixrt.messages.requests import ChatPrompt, TextPrompt

    if isinstance(prompt, str):
        return TextPrompt(prompt)
    return ChatPrompt(
        messages=[_template_message(message) for message in prompt],
        tools=list(tools) or None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes the arguments of calls as a text; templates write them as JSON themselves."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": msgspec.json.decode(call["function"]["arguments"] or "{}")}}
        for call in message["tool_calls"]
    ]  # fmt: skip
    return {**message, "tool_calls": calls}


def _piece(chunk: "AnswerChunk", usage: Usage, has_called: bool) -> Piece:
    calls = tuple(
        ToolCallPiece(
            index=call.index,
            id=f"call-{uuid.uuid4().hex}" if call.name else "",
            name=call.name,
            arguments=call.arguments,
        )
        for call in chunk.tool_calls or ()
    )
    finish_reason: str | None = chunk.finish_reason
    if has_called and finish_reason == "stop":
        finish_reason = "tool_calls"
    return Piece(
        index=chunk.index,
        text=chunk.text,
        reasoning=chunk.reasoning,
        tool_calls=calls,
        finish_reason=finish_reason,
        usage=usage,
        times=_times(chunk),
    )


def _times(chunk: "AnswerChunk") -> ServerTimes | None:
    if chunk.times is None or chunk.index != 0:
        return None
    times = chunk.times
    return ServerTimes(queued_s=times.queued_s, prefill_s=times.prefill_s, total_s=times.total_s)


def _cache_hints(hints: CacheHints) -> Any:
    from radixrt.messages import requests

    return requests.CacheHints(next_use_s=hints.next_use_s, session=hints.session)


def _constraint_keywords(constraint: Constraint | None) -> dict[str, Any]:
    match constraint:
        case JsonSchema():
            return {"schema": constraint.schema}
        case Regex():
            return {"regex": constraint.pattern}
        case Choices():
            return {"choices": list(constraint.texts)}
        case Grammar():
            return {"grammar": constraint.text}
    return {}


def _translated(error: RequestError | EngineDiedError) -> BackendError:
    if isinstance(error, EngineDiedError):
        return ConnectionLost(f"The engine in this process ended: {error}")
    return BadRequest(error.message, error.status, error.param)
