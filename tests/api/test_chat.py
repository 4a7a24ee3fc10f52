"""Chat completions through the openai client."""

from pathlib import Path

from tests.api.conftest import RunningServer, StartServer
from tests.checkpoints.tiny_tokenizers import save_byte_level

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


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_tool_call_is_taken_from_the_answer(server: RunningServer) -> None:
    server.answer_with(CALL)
    create = server.openai.chat.completions.create
    choice = create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=200).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    function = choice.message.tool_calls[0].function
    assert (function.name, function.arguments) == ("weather", '{"city": "Paris"}')


def test_a_tool_call_is_taken_from_a_stream(server: RunningServer) -> None:
    server.answer_with(f"Well. {CALL}")
    create = server.openai.chat.completions.create
    stream = create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=200, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(c.delta.content for c in choices) == "Well. "
    calls = [call for c in choices for call in c.delta.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls if c.id] == [(0, "weather")]
    assert "".join(c.function.arguments for c in calls) == '{"city": "Paris"}'
    assert choices[-1].finish_reason == "tool_calls"


def test_without_tools_the_text_stays_as_it_is(server: RunningServer) -> None:
    server.answer_with(CALL)
    create = server.openai.chat.completions.create
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = create(model="tiny", messages=HELLO, max_tokens=200, **extra).choices[0]
        assert choice.message.content == CALL and choice.finish_reason == "stop"


def test_reasoning_effort_reaches_the_template(start_server: StartServer, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}, effort {{ reasoning_effort }}"
    server = start_server(model=save_byte_level(tmp_path, template))
    with server.http as http:
        body = {"messages": HELLO, "reasoning_effort": "low"}
        assert http.post("/tokenize", json=body).json()["prompt"] == "hi, effort low"


def test_logprobs_cover_every_token_with_its_bytes(server: RunningServer) -> None:
    server.answer_with("naïve 🦊")
    create = server.openai.chat.completions.create
    for stream in (False, True):
        answer = create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=stream)
        chunks = list(answer) if stream else [answer]
        content = [
            t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content
        ]
        assert bytes(b for t in content for b in t.bytes).decode() == "naïve 🦊<|im_end|>"
        assert all(len(t.top_logprobs) == 2 for t in content)


def test_n_answers_stream_side_by_side(server: RunningServer) -> None:
    stream = server.openai.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == ["Hello world"] * 3


def test_text_parts_the_developer_role_and_tool_messages_reach_the_template(
    server: RunningServer,
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    body = {"extra_body": {"return_token_ids": True}}
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, **body)
    rendered = server.vocabulary.decode(answer.prompt_token_ids)
    assert rendered == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )


def test_max_completion_tokens_wins_over_its_old_name(server: RunningServer) -> None:
    server.answer_endlessly()
    create = server.openai.chat.completions.create
    answer = create(model="tiny", messages=HELLO, max_tokens=9, max_completion_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"
