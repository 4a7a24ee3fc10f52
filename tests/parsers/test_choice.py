"""The parsers that are chosen for a model whose settings name none."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import resolve_model_path
from radixrt.parsers.choice import with_parsers
from radixrt.parsers.marks import ModelMarks
from tests.checkpoints.tiny_tokenizers import CHATML, save_byte_level

QWEN = (
    "return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
THINKS = "{%- if '</think>' in content %}{{- '<think>\\n' + reasoning_content }}{%- endif %}"
CODER = (
    "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n"
    "</parameter>\\n</function>\\n</tool_call>"
)
LLAMA = "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '\"parameters\": ' }}"
DEEPSEEK = "{{'<\uff5cAssistant\uff5c>'}}{% set content = content.split('</think>')[-1] %}"
HARMONY = (
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}{{- '<|call|>' }}"
)
GEMMA4 = """{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '<|channel>thought\\n' + text + '\\n<channel|>' -}}"""
GLM = "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>"
MINIMAX = '<minimax:tool_call>\\n<invoke name="tool-name-1">'
SEED = "{%- set think_end_token = '</seed:think>' -%}<seed:tool_call>\\n<function=example_function_name>"
HUNYUAN = (
    "{{- '<\uff5chy_Assistant\uff5c>' }}<tool_calls><tool_call>function_name\\n```json\\n"
    "function_arguments_in_json_format\\n```</tool_call>"
)
DEEPSEEK_V3 = "{{- '<\uff5cAssistant\uff5c><\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>' + tool['type'] + '\\n```json\\n' }}"
DEEPSEEK_V31 = "{{- '<\uff5cAssistant\uff5c></think><\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>' + name }}"
KIMI = "{{- '<|tool_calls_section_begin|><|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}"
ROLES = "{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}"
GRANITE = ROLES + " respond only with <|tool_call|> followed by a JSON list of tools used."
IN_LETTERS = "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'"
IN_TAGS = (
    "Write your thoughts between <think></think> and your response between <response></response>"
)
EXAONE = "{%- set end = '[|endofturn|]' %}<tool_call>{\\\"name\\\": function_1_name}</tool_call>"
OLMO = "within <functions></functions>. Output any function calls within <function_calls></function_calls>"
MINISTRAL = "{{- '[TOOL_CALLS]' }}{{- name + '[ARGS]' + arguments }}{{- '[THINK]' + thinking + '[/THINK]' }}"


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        (CHATML, "none", "none"),
        (CHATML + QWEN, "hermes", "none"),
        (CHATML + QWEN + THINKS, "hermes", "qwen3"),
        (CHATML + CODER, "qwen3_coder", "none"),
        (LLAMA, "llama3_json", "none"),
        (DEEPSEEK, "none", "deepseek-r1"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral", "none"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}{{- '[THINK]' + text }}", "mistral", "mistral"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral_v3", "none"),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", "none"),
        ("{{- '<start_function_call>call:' ~ name }}", "functiongemma", "none"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "none", "none"),
        ("{{ '<|tool|>' }} formatted as functools[{...}]", "phi4_mini", "none"),
        (GEMMA4, "gemma4", "gemma4"),
        (HARMONY, "harmony", "harmony"),
        (GLM + THINKS, "glm45", "qwen3"),
        (GLM.replace("\\n", "") + THINKS, "glm47", "qwen3"),
        (MINIMAX + THINKS, "minimax_m2", "qwen3"),
        (SEED, "seed_oss", "seed_oss"),
        (HUNYUAN + THINKS, "hunyuan", "hunyuan"),
        (DEEPSEEK_V3, "deepseek_v3", "none"),
        (DEEPSEEK_V31 + THINKS, "deepseek_v31", "deepseek-r1"),
        (KIMI + THINKS, "kimi_k2", "qwen3"),
        (GRANITE, "granite", "none"),
        (GRANITE + IN_LETTERS, "granite", "granite"),
        (GRANITE + IN_TAGS, "granite", "granite33"),
        (ROLES + QWEN, "hermes", "none"),
        (EXAONE + THINKS, "exaone4", "qwen3"),
        (CHATML + OLMO, "olmo3", "none"),
        (CHATML + OLMO + THINKS, "olmo3", "qwen3"),
        (MINISTRAL, "mistral", "mistral"),
        (QWEN + THINKS + "{{ '<response>\\n' }}", "hermes", "ernie45"),
        (None, "none", "none"),
    ],
)
def test_the_template_tells(
    tmp_path: Path, template: str | None, tool_calls: str, reasoning: str
) -> None:
    config = ServerConfig(model_path=str(save_byte_level(tmp_path, template)))
    chosen = with_parsers(config)
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == (tool_calls, reasoning)


def test_a_template_that_fits_several_formats_says_which_flag_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_byte_level(tmp_path, LLAMA + QWEN)
    with caplog.at_level(logging.WARNING):
        assert with_parsers(ServerConfig(model_path=str(folder))).tool_call_parser == "none"
    assert "--tool-call-parser" in caplog.text and "hermes, llama3_json" in caplog.text


def test_the_vocabulary_tells_where_the_template_does_not(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path, "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|tool_call|>", "<|/tool_call|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = ServerConfig(model_path=str(folder))
    assert with_parsers(config).tool_call_parser == "phi4_mini"
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="added tokens"):
        with_parsers(config)
    (folder / "chat_template.jinja").write_text(QWEN)
    assert with_parsers(config).tool_call_parser == "hermes"  # reads no vocabulary


def test_a_parser_that_is_set_stays(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path, CODER + THINKS)
    for set_one in ({"tool_call_parser": "hermes"}, {"reasoning_parser": "none"}):
        config = ServerConfig(model_path=str(folder), **set_one)  # type: ignore[arg-type]
        chosen = with_parsers(config)
        both = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3"} | set_one
        assert (chosen.tool_call_parser, chosen.reasoning_parser) == tuple(both.values())


def test_the_template_of_the_command_line_counts(tmp_path: Path) -> None:
    folder, mine = save_byte_level(tmp_path / "model", QWEN), tmp_path / "mine.jinja"
    config = ServerConfig(model_path=str(folder), chat_template=str(mine))
    with pytest.raises(ConfigError, match="chat template"):
        with_parsers(config)
    mine.write_text(CODER)
    assert with_parsers(config).tool_call_parser == "qwen3_coder"


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA}))
    assert ModelMarks.from_checkpoint(tmp_path).template == LLAMA
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": CODER}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert ModelMarks.from_checkpoint(tmp_path).in_template("<function=")
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert ModelMarks.from_checkpoint(tmp_path).template == "own file"


def test_the_built_in_model_calls_as_hermes_and_does_not_reason() -> None:
    chosen = with_parsers(ServerConfig(model_path=str(resolve_model_path(DEMO_MODEL))))
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("hermes", "none")
