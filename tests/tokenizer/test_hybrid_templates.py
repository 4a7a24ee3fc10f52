"""Chat templates with the features of those of the hybrid families: they render in the sandbox, and
``auto`` finds the formats of their calls and their reasoning."""

from pathlib import Path
from typing import Any

import pytest

from radixrt.base.config import ServerConfig
from radixrt.messages.requests import ChatPrompt
from radixrt.parsers.choice import with_parsers
from radixrt.parsers.reasoning import FORMATS as REASONING
from radixrt.parsers.reasoning import ReasoningParser
from radixrt.parsers.tool_calls.parser import ToolCallParser
from radixrt.parsers.tool_calls.registry import FORMATS
from radixrt.tokenizer.prompt.chat_template import ChatTemplate
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

# Qwen 3.5: calls as XML, arguments by ``items``, reasoning before the last question dropped.
QWEN3_5 = """{%- macro shown(content) %}{%- if content is string %}{{- content }}{%- elif content is none or content is undefined %}{{- '' }}
{%- else %}{{- raise_exception('Unexpected content.') }}{%- endif %}{%- endmacro %}
{%- if tools and tools is iterable and tools is not mapping %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n<function=example>\\n<parameter=first>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(searches=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searches and message.role == 'user' %}{%- set content = shown(message.content)|trim %}
{%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}{%- set ns.searches = false %}{%- set ns.last = index %}{%- endif %}{%- endif %}{%- endfor %}
{%- if ns.searches %}{{- raise_exception('No question.') }}{%- endif %}
{%- for message in messages %}{%- set content = shown(message.content)|trim %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' + thought|trim + '\\n</think>\\n\\n' if loop.index0 > ns.last else '') + content }}
{%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- ('\\n\\n' if loop.first and content|trim else '\\n' if not loop.first else '') + '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments|items %}{{- '<parameter=' + name + '>\\n' }}
{%- set value = value if value is string else value | tojson | safe %}{{- value }}{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n') }}{%- endif %}"""
# Nemotron 3: the same calls; each answer begins with its reasoning, which may be empty.
NEMOTRON3 = """{%- set truncates = truncate_history_thinking if truncate_history_thinking is defined else True %}
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- '<|im_start|>system\\n' }}{%- if tools is iterable and tools|length > 0 %}
{%- for tool in tools %}{{- '<function>\\n<name>' ~ tool.function.name ~ '</name>' }}
{%- for name, field in tool.function.parameters.properties|items %}{{- '\\n<' ~ name ~ '>' ~ (field.type | string) ~ '</' ~ name ~ '>' }}{%- endfor %}{{- '\\n</function>\\n' }}{%- endfor %}
{{- '<tool_call>\\n<function=example>\\n<parameter=first>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- set content = message.content | default('', true) %}
{%- if message.reasoning_content is defined and message.reasoning_content is string %}{%- set content = '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' ~ content %}
{%- elif '<think>' not in content %}{%- set content = '<think></think>' ~ content %}{%- endif %}
{%- if truncates and loop.index0 < ns.last %}{%- set content = '<think></think>' ~ content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>assistant\\n' ~ content | trim }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for name, value in call.function.arguments|items %}{{- '<parameter=' ~ name ~ '>\\n' ~ (value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string) ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>user\\n' ~ message.content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' ~ ('<think></think>' if enable_thinking is defined and enable_thinking is false else '<think>\\n') }}{%- endif %}"""
# Nemotron 2: one JSON list of calls; "/no_think" in a message.
NEMOTRON2 = """{%- set ns = namespace(thinks=true) -%}
{%- for message in messages -%}{%- if message['role'] in ['user', 'system'] and '/no_think' in message['content'] -%}{%- set ns.thinks = false -%}{%- endif -%}{%- endfor -%}
{{- '<SPECIAL_10>System\\n' -}}{%- if tools -%}{{- '<AVAILABLE_TOOLS>[' -}}
{%- for tool in tools -%}{{- (tool.function if tool.function is defined else tool) | tojson -}}{{- ', ' if not loop.last else '' -}}{%- endfor -%}
{{- ']</AVAILABLE_TOOLS>\\n<TOOLCALL>[{{\\"name\\": \\"tool\\", \\"arguments\\": \\"args\\"}}]</TOOLCALL>\\n' -}}{%- endif -%}
{%- for message in messages %}{%- set content = message['content'] %}{%- if message['role'] == 'assistant' -%}
{%- if content and '</think>' in content -%}{%- set content = (content.split('</think>')[1] | default('', true)).strip() %}{%- endif -%}
{{- '<SPECIAL_11>Assistant\\n' + (content | default('', true)).strip() }}
{%- if message.tool_calls -%}{{- '<TOOLCALL>[' -}}{%- for call in message.tool_calls -%}{%- set fn = call.function if call.function is defined else call -%}
{{- '{"name": "' + fn.name + '", "arguments": ' -}}{{- fn.arguments if fn.arguments is string else fn.arguments | tojson -}}{{- '}' + (', ' if not loop.last else '') -}}{%- endfor -%}{{- ']</TOOLCALL>' -}}{%- endif -%}{{- '\\n<SPECIAL_12>\\n\\n' -}}
{%- else -%}{{- '<SPECIAL_11>User\\n' + content.replace('/no_think', '').strip() + '\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<SPECIAL_11>Assistant\\n' + ('<think>\\n\\n' if ns.thinks else '<think></think>') -}}{%- endif -%}"""
# LFM2.5: Python calls in tags, whose parts have the tag ``generation``, and today's date.
LFM2_5 = """{%- macro written(value) -%}{%- if value is string -%}{{- "'" + value + "'" -}}{%- elif value is mapping -%}{{- value | tojson -}}{%- else -%}{{- value | string -}}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last=-1, calls=[]) -%}
{%- if tools -%}{{- '<|im_start|>system\\n' + strftime_now('%Y') + '\\nList of tools: ' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}{%- generation -%}
{%- if message.thinking is defined and loop.index0 > ns.last -%}{{- '<think>' + message.thinking + '</think>' -}}{%- endif -%}
{%- if message.content is defined -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls is defined -%}{%- for call in message.tool_calls -%}{%- set made = namespace(args=[]) -%}
{%- for name, value in call['function']['arguments'].items() -%}{%- set made.args = made.args + [name + '=' + written(value)] -%}{%- endfor -%}
{%- set ns.calls = ns.calls + [call['function']['name'] + '(' + (made.args | join(', ')) + ')'] -%}{%- endfor -%}
{{- '<|tool_call_start|>[' + (ns.calls | join(', ')) + ']<|tool_call_end|>' -}}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else %}{{- message.get('content') + '<|im_end|>\\n' -}}{%- endif %}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# Granite 4 and Qwen3-Next: Hermes' calls. Falcon-H1: one list between the same tags.
GRANITE4 = """{%- if tools %}{{- '<|start_of_role|>system<|end_of_role|>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|end_of_text|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|end_of_text|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
FALCON_H1 = """{%- if tools %}{{ '<|im_start|>system
<tools>' + tools|tojson(indent=2) + '</tools>
<tool_call>
[
{"name": "function_name", "arguments": {"arg": "value"}}
]
</tool_call><|im_end|>
' }}{%- endif %}{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}{{ '\\n<tool_call>\\n' + (message.tool_calls|map(attribute='function')|list)|tojson + '\\n</tool_call>' }}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

FAMILIES = {
    "qwen3_5": (QWEN3_5, "qwen3_coder", "qwen3"),
    "nemotron_3": (NEMOTRON3, "qwen3_coder", "qwen3"),
    "nemotron_2": (NEMOTRON2, "nemotron_json", "qwen3"),
    "lfm2_5": (LFM2_5, "lfm2", "qwen3"),
    "granite_4": (GRANITE4, "hermes", "none"),
    "falcon_h1": (FALCON_H1, "falcon", "none"),
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There.", "reasoning_content": "An old thought"},
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "A new thought",
        "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
    },
]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_template_shows_the_model_is_what_the_parsers_read(
    family: str, tmp_path: Path
) -> None:
    template, calls, reasoning = FAMILIES[family]
    config = with_parsers(ServerConfig(model_path=str(save_byte_level(tmp_path, template))))
    assert (config.tool_call_parser, config.reasoning_parser) == (calls, reasoning)
    render = ChatTemplate(Vocabulary.load(config)).render
    asked = render(ChatPrompt(CHAT[:3], tools=TOOLS)).text
    whole = render(ChatPrompt(CHAT, tools=TOOLS, add_generation_prompt=False)).text
    assert "weather" in asked and "An old thought" not in asked
    answer = whole[whole.index("How is it?") :]  # as the template repeats it
    parser = ToolCallParser(FORMATS[calls], tools={"weather": WEATHER})
    parts = [*map(parser.push, answer), parser.flush()]
    (call,) = [call for _, found in parts for call in found]
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo", "days": 3}')
    assert "I look." in "".join(content for content, _ in parts)
    if reasoning == "qwen3" and family != "nemotron_2":  # whose template drops it
        thoughts = ReasoningParser(REASONING[reasoning], asked.rstrip()[-20:])
        opening = "" if asked.rstrip().endswith("<think>") else "<think>"
        found = thoughts.push(f"{opening}A new thought</think>I look.")
        assert found == ("A new thought", "I look.")
        assert "A new thought" in answer


@pytest.mark.parametrize(
    ("template", "marks", "chosen"),
    [
        ("List of tools: <|tool_list_start|>", [], "lfm2"),
        ("List of tools: [", ["<|tool_call_start|>"], "lfm2"),
        ("List of tools: [", [], "none"),
    ],
)
def test_templates_of_lfm2_show_the_list_of_tools_alone(
    tmp_path: Path, template: str, marks: list[str], chosen: str
) -> None:
    from tokenizers import Tokenizer

    folder = save_byte_level(tmp_path, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert with_parsers(ServerConfig(model_path=str(folder))).tool_call_parser == chosen
