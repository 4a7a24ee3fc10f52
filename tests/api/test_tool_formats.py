"""Each format of tool calls through a chat that streams: a scripted model writes it, and the openai
client gets the calls."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.api.conftest import RunningServer, StartServer
from tests.checkpoints.tiny_tokenizers import CHATML, save_byte_level
from tests.parsers.test_formats import CONTROL_MARKS, OUTPUTS, TOOLS
from tests.servers.fake_scheduler import engine_info

TEMPLATES = {
    "lfm2": "List of tools: <|tool_list_start|>",
    "nemotron_json": "<TOOLCALL>[ <think>",
    "falcon": "<tool_call>\n[\n",
    "qwen3_coder": "<tool_call><function=example><parameter=a> <think> </think>",
    "mistral": "[TOOL_CALLS]example[ARGS] [THINK]",
    "mistral_v3": "[TOOL_CALLS] [",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "functiongemma": "<start_function_call>call:",
    "gemma4": "<|tool_call>call: <|channel>thought <channel|>",
    "phi4_mini": "<|tool|>functools[",
    "seed_oss": "<seed:tool_call> <seed:think>",
    "minimax_m2": '<minimax:tool_call><invoke name="example"> </think>',
    "glm47": "<tool_call>{example}<arg_key>a</arg_key>",
    "olmo3": "<functions></functions><function_calls>",
}
"""The marks by which each is recognised, of formats that differ in more than marks."""
REASONING = {
    "nemotron_json": ("<think>", "</think>"),
    "qwen3_coder": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "minimax_m2": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
OFFERED: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in TOOLS.items()
]


def start(start_server: StartServer, folder: Path, form: str) -> RunningServer:
    """A server that has to recognise the format. The marks that are control tokens of some model
    are so here."""
    save_byte_level(folder, CHATML + "{# " + TEMPLATES[form] + " #}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tags = {tag.removesuffix("thought\n") for pair in REASONING.values() for tag in pair}
    tokenizer.add_special_tokens(sorted(CONTROL_MARKS | tags))
    tokenizer.save(str(folder / "tokenizer.json"))
    info = engine_info(context_length=4096, vocab_size=tokenizer.get_vocab_size())
    return start_server(info, folder, tool_call_parser="auto")


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_stream_has_the_calls_of_the_format(
    start_server: StartServer, tmp_path: Path, form: str
) -> None:
    server = start(start_server, tmp_path, form)
    opening, closing = REASONING.get(form, ("", ""))
    cases = [
        (output, thinks)
        for output in OUTPUTS[form]
        for thinks in ({True, False} if opening else {False})
    ]
    for output, thinks in cases:
        thought = f"{opening}Which one?{closing}" if thinks else ""
        server.answer_with(thought + output.text)
        chunks = [*server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], tools=OFFERED, max_tokens=1000, stream=True)]  # fmt: skip
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls: dict[int, tuple[str, str]] = {}
        for piece in (piece for delta in deltas for piece in delta.tool_calls or ()):
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (
                name + (piece.function.name or ""),
                arguments + piece.function.arguments,
            )
        assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == output.calls
        assert "".join(delta.content or "" for delta in deltas) == output.content
        reasoning = "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
        assert reasoning == ("Which one?" if thinks else "")
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    first = OUTPUTS[form][-1]
    server.answer_with(first.text.removeprefix(first.content))
    message = server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], tools=OFFERED, tool_choice="required", max_tokens=1000).choices[0].message  # fmt: skip
    found = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert found == first.calls
