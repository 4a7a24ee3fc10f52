"""``/score_choices``: log-probabilities of several texts behind one prompt, which is sent and
computed once."""

from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response, while_connected
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import json_logprob
from radixrt.api.requests.options import check_answer_count, request_id, request_options
from radixrt.api.requests.prompts import one_prompt
from radixrt.api.requests.protocol import PromptRequest
from radixrt.api.responses import usage_json
from radixrt.api.state import ServerState
from radixrt.client.choice_scoring import ChoiceQuestion, ChoiceScores, score_choices
from radixrt.messages.requests import RequestOptions


class ScoreRequest(PromptRequest, kw_only=True):
    choices: list[str]
    """The texts; after messages, each is the assistant's message."""
    unconditional: bool | None = None
    """Also score the choices without the prompt."""


def scoring_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/score_choices", ScoreRequest)
    async def score(request: Request, fields: ScoreRequest) -> Response:
        prompt = one_prompt(fields, state, request)
        question = ChoiceQuestion(prompt, fields.choices, bool(fields.unconditional))
        name = request_id("score", fields.rid)
        request.state.request_id = name
        options = request_options(fields, state.config, caller_of(request))
        scores = await while_connected(request, _scores(name, question, options, state))
        return json_response(_as_json(name, scores))

    return router


async def _scores(
    name: str, question: ChoiceQuestion, options: RequestOptions, state: ServerState
) -> ChoiceScores:
    check_answer_count(state.config, len(question.choices) * (2 if question.unconditional else 1))
    return await score_choices(state.client, state.run, name, question, options)


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
        "usage": usage_json(
            scores.prompt_tokens, scores.choice_tokens, {"cached_tokens": scores.cached_tokens}
        ),
    }
