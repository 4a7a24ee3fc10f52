"""The report of an answer is the same wherever it is read: ``LLM``, HTTP, the language."""

import asyncio
from typing import Any

import httpx
import pytest

import radixrt.lang as rl
from radixrt import LLM, Answer, SamplingParams
from radixrt.lang.backends.engine import Engine, _InProcess
from radixrt.messages.answers import AnswerReport

PROMPT = "The owner of Vidur is Noval. The owner of Bramol is Teska. The owner of Vidur is"
SAMPLING = {"temperature": 0.0, "max_tokens": 7, "min_tokens": 7}


@pytest.fixture
def llm(tiny_llm: LLM) -> LLM:
    """With an empty cache."""
    tiny_llm.flush_cache()
    return tiny_llm


def post(llm: LLM, path: str, **body: Any) -> dict[str, Any]:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=_InProcess(llm), base_url="http://here") as client:
            return await client.post(path, json=body)

    response = asyncio.run(send())
    assert response.status_code == 200, response.text
    return response.json()


def reports(llm: LLM) -> list[tuple[int, int, int]]:
    """Tokens of the prompt, of these from the cache, and of the answer: by every way to ask."""
    output = llm.generate(PROMPT, SamplingParams(**SAMPLING))
    *_, last = llm.stream(PROMPT, SamplingParams(**SAMPLING))
    completion = post(llm, "/v1/completions", prompt=PROMPT, **SAMPLING)["usage"]
    settings = {"temperature": 0.0, "max_new_tokens": 7, "min_new_tokens": 7}
    native = post(llm, "/generate", text=PROMPT, sampling_params=settings)["meta_info"]

    @rl.function
    def program(s: rl.State) -> None:
        s += PROMPT + rl.gen("answer", **SAMPLING)

    (call,) = program.run(backend=Engine(llm)).calls()
    answer = output.answers[0]
    return [
        (output.num_prompt_tokens, output.cached_tokens, answer.output_tokens),
        (last.report.prompt_tokens, last.report.cached_tokens, last.report.output_tokens),
        (
            completion["prompt_tokens"],
            completion["prompt_tokens_details"]["cached_tokens"],
            completion["completion_tokens"],
        ),
        (native["prompt_tokens"], native["cached_tokens"], native["completion_tokens"]),
        (call.usage.prompt_tokens, call.usage.cached_tokens, call.usage.completion_tokens),
    ]


def test_every_way_to_ask_gets_the_same_report(llm: LLM) -> None:
    cold = llm.generate(PROMPT, SamplingParams(**SAMPLING))
    assert cold.cached_tokens == 0 < cold.cache_write_tokens <= cold.num_prompt_tokens
    found = reports(llm)
    assert len(found) == 5 and len(set(found)) == 1
    prompt_tokens, cached_tokens, output_tokens = found[0]
    assert prompt_tokens > 16 and output_tokens == 7
    assert cached_tokens == (prompt_tokens - 1) // 4 * 4


def test_an_answer_has_every_field_of_its_report() -> None:
    assert set(AnswerReport.__struct_fields__) < set(Answer.__struct_fields__)
