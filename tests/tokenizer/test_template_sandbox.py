"""Hostile chat templates end in time and in little memory; others render as without limits."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt import template_sandbox
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

LIMITS = Limits(context_length=512, kv_pool_tokens=2048, vocab_size=420)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"name": "f", "arguments": {"a": [1, 2.5, None, "ä"]}}]},
    {"role": "user", "content": "x" * 50},
]  # fmt: skip

ENDLESS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop over a filter": "{% for a in range(99999) %}{% for b in range(99999) | map('string') %}{% endfor %}{% endfor %}",
    "loop with a condition": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "filters without a loop": "{% for a in range(99999) %}{{ range(99999) | map('string') | last }}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "deep recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive loop": "{% for a in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
    "comparison": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "search": "{% set x = 'a' * 30000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "slices": "{% set x = 'a' * 30000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
}  # fmt: skip

LARGE = {
    "product": "{{ 'a' * 10**10 }}",
    "reversed product": "{% set n = 10**10 %}{{ n * 'a' }}",
    "list": "{% set x = [0] * 10**10 %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "concatenation": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sum": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "sum of lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "block": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "literal text " * 1000 + "{% endfor %}",
    "output of a macro": "{% macro m() %}" + "literal text " * 1000 + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "join": "{{ ('a' * 10**6).join(['b'] * 10**6) }}",
    "join of a text": "{{ ('a' * 10**6).join('b' * 10**6) }}",
    "join filter": "{{ (['b'] * 10**6) | join('a' * 10**6) }}",
    "sum filter": "{{ ([[0] * 10**4] * 10**5) | sum(start=[]) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "keyword": "{{ 'a' | center(width=10**10) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "indent": "{{ ('\\n' * 10**6) | indent(10**6) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "tabs": "{{ '\\t'.expandtabs(10**10) }}",
    "zeros": "{{ '1'.zfill(10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10**10) }}",
    "many fields": "{{ ('{0}' * 10**6).format('a' * 10**6) }}",
    "map": "{{ range(9) | map('center', 10**10) | list }}",
    "mapped replace": "{{ ['a' * 10**6] | map('replace', 'a', 'b' * 10**6) | list }}",
    "indented JSON": "{{ ([[]] * 10**6) | tojson(indent=10**6) }}",
    "nested JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "nested text": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested string filter": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string | length }}",
}  # fmt: skip

ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "attr": "{{ '' | attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format through map": "{{ ['{0.__class__}'] | map('format', 1) | list }}",
    "changing the messages": "{% set _ = messages.append(1) %}",
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptEncoder]:
    folder = tmp_path_factory.mktemp("model")
    yield PromptEncoder(Vocabulary.load(ServerConfig(model_path=str(save_byte_level(folder)))))


def render(encoder: PromptEncoder, template: str) -> str:
    encoder._vocabulary.hf.chat_template = template
    text, _, *_ = encoder.encode(ChatPrompt(messages=MESSAGES), LIMITS)
    return text


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(
    encoder: PromptEncoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    begin = time.thread_time()
    with pytest.raises(RequestError, match="chat template refused the conversation"):
        render(encoder, ENDLESS[name])
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_does_not_reach_python(encoder: PromptEncoder, name: str) -> None:
    try:
        text = render(encoder, ESCAPES[name])
    except RequestError as error:
        assert "refused the conversation" in str(error) or "empty" in str(error)
    else:
        assert "class" not in text and "uid=" not in text
    assert len(MESSAGES) == 4


MEMORY = """
import resource, sys, time
from tests.tokenizer.test_template_sandbox import LARGE, MESSAGES
from radixrt.tokenizer.prompt import template_sandbox
from transformers.utils import chat_template_utils
template_sandbox.install()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
for name, source in LARGE.items():
    begin = time.thread_time()
    try:
        with template_sandbox.bounded():
            chat_template_utils._compile_jinja_template(source).render(messages=MESSAGES)
    except template_sandbox.TemplateTooExpensiveError:
        if time.thread_time() - begin < 5:
            continue
        print(name, "is slow")
    except Exception as error:
        print(name, repr(error))
    else:
        print(name, "rendered")
"""


def test_no_template_takes_much_memory() -> None:
    """In a process that can have 1 GiB more: each is refused before that is too little."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


HARMLESS = {
    "chat": "{% for m in messages %}<|im_start|>{{ m.role ~ '\n' + m['content'] | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "namespace": "{% set n = namespace(text='', found=false) %}{% for m in messages if m.role == 'user' %}{% set n.text = n.text + m.content %}{% endfor %}{{ n.text | length }}{{ n.text[:3] }}",
    "loop facts": "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.revindex0 }}{{ loop.previtem.role if not loop.first }}{{ loop.nextitem.role if not loop.last }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "loop over a filter": "{% for r in messages | map(attribute='role') | reject('equalto', 'system') %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ r }}{% else %}none{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "macro": "{% macro show(x, y='-') %}{{ x.role }}{{ y }}{{ caller() if caller else '' }}{% endmacro %}{{ show(messages[0]) }}{% call show(messages[1], y='+') %}inner{% endcall %}",
    "recursion": "{% for x in [{'v': 1, 'c': [{'v': 2}, {'v': 3}]}] recursive %}{{ x.v }}{% if x.c %}({{ loop(x.c) }}){% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[2].tool_calls | tojson(indent=4) }}{{ messages[0] | tojson(separators=(',', ':')) }}",
    "items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in messages[0] | dictsort %}{{ k }}{% endfor %}{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
    "texts": "{{ 'a,b'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'abc'.startswith('a') }}{{ 'abc' | replace('b', 'x') }}{{ 'a-b'.replace('-', '+', 1) }}{{ ','.join(['a', 'b']) }}{{ ['a', 1] | join('; ') }}{{ 'abc' | upper }}{{ 'x'.center(5) }}{{ '%s and %03d' % ('a', 7) }}{{ '{} {x:>4}'.format('a', x='b') }}{{ '%s' | format('q') }}{{ 'a\nb' | indent(2) }}{{ 'abcdef' | truncate(5) }}",
    "numbers": "{{ 7 % 3 }}{{ 2 ** 10 }}{{ 6 * 7 }}{{ 1 + 2.5 }}{{ [1, 2] + [3] }}{{ [1, 2] | sum }}{{ 'ab' * 3 }}{{ [0] * 2 }}{{ (1, 2) + (3,) }}{{ 7 // 2 }}{{ 3.7 | int }}{{ -3 | abs }}",
    "blocks": "{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{% with y = 3 %}{{ y }}{% endwith %}{% generation %}g{{ x }}{% endgeneration %}",
    "tests": "{{ none is none }}{{ messages is iterable }}{{ x is defined }}{{ x }}{{ x | default('d') }}{{ 'a' in 'abc' }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [3, 1] | sort | first }}{{ messages[::-1][0].role }}{{ range(3) | list }}{{ true and 'yes' or 'no' }}{{ dict(a=1) }}",
    "time": "{{ strftime_now('%Y') | length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_other_templates_render_as_without_limits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": True}
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 60.0)
    template_sandbox.install()
    compile_template = chat_template_utils._compile_jinja_template.__wrapped__
    with template_sandbox.bounded():
        bounded = compile_template(HARMLESS[name]).render(**values)
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)  # fmt: skip
    plain = compile_template(HARMLESS[name])
    assert not isinstance(plain.environment, template_sandbox.BoundedSandbox)
    assert bounded == plain.render(**values) != ""


def test_a_template_may_still_refuse_a_conversation(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render(encoder, "{{ raise_exception('roles must alternate') }}")
