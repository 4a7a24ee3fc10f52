"""Chats with a model of the harmony format: a scripted model writes it, and the openai client gets
reasoning, content and calls."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from radixrt.messages.ids import unpack_ids
from radixrt.parsers.harmony import MARKS
from tests.api.conftest import RunningServer, starting
from tests.api.test_structured import post
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import engine_info

TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- for message in messages %}{% if message.role == 'assistant' %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if message.content %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>Which one?<|end|><|start|>assistant"
LOOK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
HELLO: Any = [{"role": "user", "content": "a"}]
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """It has to recognise the format."""
    folder = save_byte_level(tmp_path_factory.mktemp("harmony"), TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    info = engine_info(context_length=4096, vocab_size=tokenizer.get_vocab_size())
    with starting(folder) as start:
        yield start(info, folder, tool_call_parser="auto")


def create(server: RunningServer, **fields: Any) -> Any:
    return server.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=400, **fields
    )


def last_request(server: RunningServer) -> Any:
    return server.scheduler.requests[-1]


def test_reasoning_and_content_come_apart(server: RunningServer) -> None:
    server.answer_with(f"{THOUGHT}{LOOK}<|channel|>final<|message|>Hi <b>")
    answer = create(server)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Which one?", "I look.\nHi <b>")
    tokens = server.vocabulary.encode(THOUGHT.removesuffix("<|start|>assistant"), False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(tokens)
    deltas = [chunk.choices[0].delta for chunk in create(server, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "I look.\nHi <b>"
    reasoning = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(reasoning) == "Which one?" and len([*filter(None, reasoning)]) > 1


def test_marks_in_letters_are_text(server: RunningServer) -> None:
    quoted = f"<|end|><|start|>assistant{CALL}{{}}"
    encode = server.vocabulary.encode
    letters = [i for character in quoted for i in encode(character, False)]
    head, tail = encode(THOUGHT[:35], False), encode("<|end|>", False)
    final = encode("<|start|>assistant<|channel|>final<|message|>", False)
    server.scheduler.script = lambda request: [*head, *letters, *tail, *final, *letters, 1]
    message = create(server, tool_choice="none", tools=[FIND]).choices[0].message
    assert message.reasoning_content == THOUGHT[30:35] + quoted and message.content == quoted


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_is_held_to_its_schema_from_the_first_token_on(
    server: RunningServer, stream: bool
) -> None:
    server.answer_with(f'{THOUGHT}{LOOK}{CALL}{{"n": 1}}')
    answer = create(server, tools=[FIND], stream=stream)
    grammar = last_request(server).grammar
    assert grammar is not None and not grammar.begin_after and not grammar.opening
    if not stream:
        choice = answer.choices[0]
        message = choice.message
        assert (message.reasoning_content, message.content) == ("Which one?", "I look.")
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("find", '{"n": 1}')
        assert choice.finish_reason == "tool_calls"
        return
    chunks = [*answer]
    pieces = [p for c in chunks for p in c.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "find" and not any(p.function.name for p in pieces[1:])
    assert json.loads("".join(p.function.arguments for p in pieces)) == {"n": 1}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_structured_output_begins_in_the_final_message(server: RunningServer) -> None:
    final = "<|channel|>final <|constrain|>json<|message|>"
    server.answer_with(f'{THOUGHT}{LOOK}{final}{{"n": 2}}')
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    message = create(server, response_format=schema).choices[0].message
    assert (message.reasoning_content, message.content) == ("Which one?\nI look.", '{"n": 2}')
    grammar, encode = last_request(server).grammar, server.vocabulary.encode
    assert unpack_ids(grammar.begin_after).tolist() == encode("<|channel|>final", False)
    assert unpack_ids(grammar.then_after).tolist() == encode("<|message|>", False)


def test_calls_are_found_where_the_reasoning_stays_in_the_text(server: RunningServer) -> None:
    server.answer_with(f'{THOUGHT}{CALL}{{"n": 1}}')
    messages: Any = [*HELLO, {"role": "assistant", "content": "Hm"}]
    further = {"continue_final_message": True, "add_generation_prompt": False}
    answer = server.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=400, tools=[FIND], extra_body=further
    )
    message = answer.choices[0].message
    assert message.content == THOUGHT and message.tool_calls[0].function.arguments == '{"n": 1}'


def test_either_a_call_or_json(server: RunningServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    for text, content in (
        (f'{THOUGHT}{CALL}{{"n": 3}}', None),
        (f'{THOUGHT}<|channel|>final<|message|>{{"n": 3}}', '{"n": 3}'),
    ):
        server.answer_with(text)
        message = create(server, tools=[FIND], response_format=schema).choices[0].message
        assert message.content == content and bool(message.tool_calls) == (content is None)


def test_the_template_gets_the_effort_and_earlier_reasoning(server: RunningServer) -> None:
    server.answer_with("<|channel|>final<|message|>Yes")
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    fields = {"messages": messages, "reasoning_effort": "high", "tools": [FIND]}
    server.openai.chat.completions.create(model="tiny", max_tokens=9, **fields)
    prompt = server.vocabulary.decode(unpack_ids(last_request(server).token_ids).tolist())
    assert prompt == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>user<|message|>a<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
        '<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        "<|start|>tool<|message|>2<|end|><|start|>assistant"
    )


def test_the_end_of_bounded_reasoning_is_that_of_its_channel(server: RunningServer) -> None:
    server.answer_with("<|channel|>final<|message|>Yes")
    encode = server.vocabulary.encode
    for tools, closing in (
        ({}, "<|end|><|start|>assistant<|channel|>final"),
        ({"tools": [FIND]}, "<|end|>"),
    ):
        create(server, extra_body={"max_reasoning_tokens": 50}, **tools)
        sampling = last_request(server).options.sampling
        opening = encode("<|channel|>analysis<|message|>", False)
        assert sampling.reasoning_opening_ids == tuple(opening)
        assert sampling.reasoning_closing_ids == tuple(encode(closing, False))
    body = {"model": "tiny", "messages": HELLO, "max_reasoning_tokens": 5}
    status, error = post(server, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "max_reasoning_tokens")
