"""Ids of tool calls for templates that demand nine letters and digits."""

import re
from pathlib import Path
from typing import Any

from radixrt.base.config import ServerConfig
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.prompt.chat_template import ChatTemplate
from radixrt.tokenizer.prompt.demanded_messages import with_nine_characters
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

STRICT = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}
{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}[{{ c.id }}]{% endfor %}
{% if m.role == "tool" %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"""


def history(*ids: str | None) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "f", "arguments": {}}} | ({"id": i} if i else {}) for i in ids]
    results = [{"role": "tool", "content": "1"} | ({"tool_call_id": i} if i else {}) for i in ids]
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]  # fmt: skip


def ids_of(messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def test_a_result_has_the_id_of_its_call() -> None:
    given = history("call_0123456789abcdef", "aB3dE6gH9", "call_0123456789abcdeg", None, None)
    calls, results = ids_of(with_nine_characters(given))
    assert calls == results and len(set(calls)) == 5 and calls[1] == "aB3dE6gH9"
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in calls)
    assert given == history(
        "call_0123456789abcdef", "aB3dE6gH9", "call_0123456789abcdeg", None, None
    )


def test_an_id_is_the_same_in_every_request() -> None:
    first, _ = ids_of(with_nine_characters(history("call_1", None)))
    later, _ = ids_of(with_nine_characters([*history("call_1", None), *history("call_2")]))
    assert later[:2] == first


def test_a_template_that_demands_such_ids_gets_them_and_no_other(tmp_path: Path) -> None:
    for template, wanted in ((STRICT, r"\[(\w{9})\]\s*<\1>"), (STRICT.replace("!= 9", "== 9").replace("length 9", "9"), r"\[call_1\]\s*<call_1>")):  # fmt: skip
        folder = save_byte_level(tmp_path, template)
        vocabulary = Vocabulary.load(ServerConfig(model_path=str(folder)))
        rendered = ChatTemplate(vocabulary).render(ChatPrompt(history("call_1")))
        assert re.search(wanted, rendered.text)
