"""Chat completions through the openai client."""

from tests.api.conftest import RunningServer

HELLO = [{"role": "user", "content": "hi"}]


def test_a_chat_answer_arrives_whole(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


def test_a_streamed_chat_answer_is_the_same_text(server: RunningServer) -> None:
    stream = server.openai.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == "Hello world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 1
