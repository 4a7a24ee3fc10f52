"""``/score_choices``: how likely is each of several texts behind one prompt? The prompt travels, and is computed, once."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.chat import chat_prompt
from radixrt.api.events import json_response, while_connected
from radixrt.api.formats import json_logprob
from radixrt.api.keeping import RememberedPrompt, continuation_of
from radixrt.api.protocol import ChatCompletionRequest, refuse_unsupported
from radixrt.api.sampling import deadline, priority
from radixrt.api.state import ServerState, request_id
from radixrt.cache_hint import CacheHint, hints_of
from radixrt.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.errors import RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import ChatPrompt, GenerateRequest, TextPrompt


class ScoreRequest(RememberedPrompt, kw_only=True):
    choices: list[str]
    """The texts; of a conversation, each is the assistant's message."""
    unconditional: bool | None = None
    """Also without the prompt."""
    continue_final_message: bool | None = None
    """The choices continue the last message, which is the assistant's."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    cache: CacheHint | None = None
    priority: int | None = None
    timeout: float | None = None
    rid: str | None = None


def scoring_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/score_choices")
    async def score(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        fields = to_struct(body, ScoreRequest)
        state.check_model(fields.model)
        question = ChoiceQuestion(
            _prompt(fields, state, request), fields.choices, bool(fields.unconditional)
        )
        name = request_id("score", fields.rid)
        request.state.request_id = name
        scores = await while_connected(request, _scores(name, question, fields, state))
        return json_response(_as_json(name, scores))

    return router


async def _scores(
    name: str, question: ChoiceQuestion, fields: ScoreRequest, state: ServerState
) -> ChoiceScores:
    num_sequences = len(fields.choices) * (2 if question.unconditional else 1)
    state.check_answer_count(num_sequences, 1)
    like = GenerateRequest(
        request_id=name,
        owner=name,
        prompt=question.prompt,
        cache_salt=fields.cache_salt or "",
        cache_hints=hints_of(fields.cache),
        priority=priority(fields.priority, state.config),
        deadline=deadline(fields.timeout),
    )

    async def answer(requests: list[GenerateRequest]) -> list[AnswerChunk]:
        found: dict[int, AnswerChunk] = {}
        async with aclosing(state.generate(requests)) as chunks:
            async for index, chunk in chunks:
                found[index] = chunk
        if any(chunk.finish_reason == "abort" for chunk in found.values()):
            raise RequestError("The request was dropped before all was scored.", status=408)
        return [found[index] for index in range(len(requests))]

    return await score_choices(state.client, question, like, answer)


def _prompt(fields: ScoreRequest, state: ServerState, request: Request) -> TextPrompt | ChatPrompt:
    """Raises:
    RequestError: there is not exactly one prompt, or it is not well formed.
    """
    continuation = continuation_of(fields, state, request)
    if fields.messages is None:
        text = continuation.text + (fields.prompt or "")
        return TextPrompt(text, fields.add_special_tokens is not False)
    return chat_prompt(
        ChatCompletionRequest(
            messages=fields.messages,
            tools=fields.tools,
            chat_template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning_effort,
            continue_final_message=fields.continue_final_message,
        ),
        continuation.messages,
    )


def _as_json(name: str, scores: ChoiceScores) -> dict[str, Any]:
    def numbers(logprobs: list[float] | None) -> list[float | None] | None:
        return None if logprobs is None else [json_logprob(value) for value in logprobs]

    return {
        "id": name,
        "object": "choice_scores",
        "scores": [
            {
                "logprobs": numbers(score.logprobs),
                "unconditional_logprobs": numbers(score.unconditional_logprobs),
            }
            for score in scores.scores
        ],
        "usage": {
            "prompt_tokens": scores.prompt_tokens,
            "completion_tokens": scores.choice_tokens,
            "total_tokens": scores.prompt_tokens + scores.choice_tokens,
            "prompt_tokens_details": {"cached_tokens": scores.cached_tokens},
        },
    }
