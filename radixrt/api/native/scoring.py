"""``/score_choices``: how likely is each of several texts behind one prompt? The prompt travels, and is computed, once."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.request_ids import request_id
from radixrt.api.openai.formats import json_logprob
from radixrt.api.openai.prompts import one_prompt
from radixrt.api.openai.protocol import PromptRequest
from radixrt.api.openai.sampling import queueing
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError
from radixrt.client.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.requests import GenerateRequest


class ScoreRequest(PromptRequest, kw_only=True):
    choices: list[str]
    """The texts; of a conversation, each is the assistant's message."""
    unconditional: bool | None = None
    """Also without the prompt."""


def scoring_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/score_choices", ScoreRequest)
    async def score(request: Request, fields: ScoreRequest) -> Response:
        prompt = one_prompt(fields, state, request)
        question = ChoiceQuestion(prompt, fields.choices, bool(fields.unconditional))
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
        request_id=name, owner=name, prompt=question.prompt, **queueing(fields, state.config)
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
