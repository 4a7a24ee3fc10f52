"""Clients in Python, each in a check of its own: ``python with_python.py URL CHECK``; without a
check, their names.

It runs in the clients' environment, so it imports nothing of this repository. The model answers at
random: a check is that the client understands the answer, and that constrained parts of it have
their form.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Literal

import pydantic

MODEL = "tiny"
IMAGES = "images"
"""The check whose server has a model that sees images."""
LIMIT = 300
QUESTION = "How is the weather in Oslo?"


class City(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]
    unit: Literal["C", "F"]


def ollama_chat(url: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    messages = [{"role": "user", "content": QUESTION}]
    parts = list(client.chat(MODEL, messages, stream=True, options={"num_predict": LIMIT}))
    assert parts[-1].done and parts[-1].eval_count
    answer = client.chat(MODEL, messages, format=City.model_json_schema())
    City.model_validate_json(answer.message.content)
    assert client.generate(MODEL, QUESTION, options={"num_predict": 5}).done
    assert client.list().models[0].model and client.show(MODEL) and client.ps()


def cohere_rerank(url: str) -> None:
    import cohere

    documents = ["It rains in Oslo.", "Rome was not built in a day.", "Sun in Oslo."]
    for client in (cohere.Client("none", base_url=url), cohere.ClientV2("none", base_url=url)):
        found = client.rerank(model=MODEL, query=QUESTION, documents=documents, top_n=2)
        scores = [result.relevance_score for result in found.results]
        assert len(scores) == 2 and 1 >= scores[0] >= scores[1] >= 0


def openai_agents(url: str) -> None:
    """Its default model class speaks the Responses API. It takes an answer that a limit cuts off
    for an error."""
    import agents

    called = []

    @agents.function_tool
    def weather(unit: Literal["C", "F"]) -> str:
        """The weather outside."""
        called.append(unit)
        return "rain"

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(tool_choice="required")
    agent = agents.Agent("a", instructions="Be short.", tools=[weather], model=MODEL, model_settings=settings)  # fmt: skip
    result = agents.Runner.run_sync(agent, QUESTION, max_turns=3)
    assert called and isinstance(result.final_output, str)

    async def stream() -> None:
        plain = agents.Agent("b", model=MODEL)
        run = agents.Runner.run_streamed(plain, QUESTION)
        kinds = [event.type async for event in run.stream_events()]
        assert "raw_response_event" in kinds

    asyncio.run(stream())


def litellm_all(url: str) -> None:
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    openai = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    answer = litellm.completion(messages=messages, max_tokens=LIMIT, **openai)
    assert answer.usage.completion_tokens
    response = litellm.responses(input=QUESTION, max_output_tokens=LIMIT, **openai)
    assert response.output and response.usage.output_tokens
    hosted = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none"}
    answer = litellm.completion(messages=messages, max_tokens=LIMIT, **hosted)
    assert answer.usage.completion_tokens
    local = {"model": f"ollama_chat/{MODEL}", "api_base": url}
    assert litellm.completion(messages=messages, max_tokens=LIMIT, **local).choices
    try:
        litellm.completion(messages=messages, max_tokens=10**6, **openai)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the overflow of the context was not recognized")


def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=LIMIT, use_responses_api=responses)  # fmt: skip
        assert model.invoke(QUESTION).usage_metadata["output_tokens"]
        assert list(model.stream(QUESTION))
        found = model.with_structured_output(City, method="json_schema").invoke(QUESTION)
        assert isinstance(found, City)
        bound = model.bind_tools([City], tool_choice="required", strict=True)
        assert bound.invoke(QUESTION).tool_calls[0]["name"] == "City"


def instructor_modes(url: str) -> None:
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):  # fmt: skip
        wrapped = instructor.from_openai(client, mode=mode)
        asked = {"max_retries": 3, "model": MODEL, "response_model": City}
        if mode is instructor.Mode.RESPONSES_TOOLS:
            found = wrapped.responses.create(input=QUESTION, **asked)
        else:
            found = wrapped.chat.completions.create(messages=messages, **asked)
        assert isinstance(found, City), mode


def pydantic_ai_models(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        result = Agent(model, output_type=NativeOutput(City), retries=3).run_sync(QUESTION)
        assert isinstance(result.output, City), kind
        result = Agent(model, output_type=City, retries=5).run_sync(QUESTION)
        assert isinstance(result.output, City), kind


def anthropic_all(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(model=MODEL, max_tokens=LIMIT, messages=messages) as stream:
        message = stream.get_final_message()
    assert message.usage.output_tokens
    found = client.messages.parse(model=MODEL, max_tokens=LIMIT, messages=messages, output_format=City)  # fmt: skip
    assert isinstance(found.parsed_output, City)


def images(url: str) -> None:
    """The same image by each client, whose later requests find it in the cache."""
    import anthropic
    import langchain_openai
    import ollama
    import openai

    data, limit = GRAY_PNG, 5
    data_url, question = f"data:image/png;base64,{data}", {"type": "text", "text": QUESTION}
    part = {"type": "image_url", "image_url": {"url": data_url}}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": [part, question]}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=limit)
    assert first.usage.prompt_tokens_details.image_tokens
    cached = []
    answer = client.responses.create(
        model=MODEL,
        max_output_tokens=16,
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": data_url}, {"type": "input_text", "text": QUESTION}]}],
    )  # fmt: skip
    cached.append(answer.usage.input_tokens_details.cached_tokens)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, question]
    of_anthropic = anthropic.Anthropic(base_url=url, api_key="none").messages.create(
        model=MODEL, max_tokens=limit, messages=[{"role": "user", "content": content}]
    )
    cached.append(of_anthropic.usage.cache_read_input_tokens)
    for responses in (False, True):
        model = langchain_openai.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=16, use_responses_api=responses)  # fmt: skip
        standard = {"type": "image", "base64": data, "mime_type": "image/png"}
        for image in (part, standard):
            found = model.invoke([{"role": "user", "content": [image, question]}])
            cached.append(found.usage_metadata["input_token_details"]["cache_read"])
    assert min(cached) == max(cached) > 0, cached
    message = {"role": "user", "content": QUESTION, "images": [data]}
    options = {"num_predict": limit}
    done = ollama.Client(host=url).chat(MODEL, [message], options=options)
    assert done.prompt_eval_count == first.usage.prompt_tokens


GRAY_PNG = "iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAAAAAB7tgMBAAAAGklEQVR42mNsYCAOMDGMKhxVOKpwVOEgVggA+5AAvJGYIwMAAAAASUVORK5CYII="
"""40 pixels by 30."""

CHECKS: dict[str, Callable[[str], None]] = {
    "ollama": ollama_chat,
    "openai-agents": openai_agents,
    "litellm": litellm_all,
    "langchain-openai": langchain,
    "instructor": instructor_modes,
    "pydantic-ai": pydantic_ai_models,
    "anthropic": anthropic_all,
    "cohere": cohere_rerank,
    IMAGES: images,
}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("\n".join(CHECKS))
    else:
        _, url, check = sys.argv
        os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
        CHECKS[check](url)
