"""The catalogue of request bodies that are expensive to read, to check or to answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attack:
    """One request; its body is built in the process that sends it."""

    path: str
    body: Callable[[], bytes]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _list(field: str, item: str, count: int, rest: str = "") -> Callable[[], bytes]:
    """An object with a list of equal items."""
    return lambda: f'{{"{field}": [{",".join([item] * count)}]{rest}}}'.encode()


def _chat(**fields: Any) -> bytes:
    return _json(messages=[{"role": "user", "content": "Hello"}], **fields)


def _tool(number: int, properties: int = 2) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {f"p{index}": {"type": "string"} for index in range(properties)},
    }
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def _message(content: str = "Hello") -> dict[str, str]:
    return {"role": "user", "content": content}


def _rules(count: int) -> str:
    rules = [f'r{index} ::= "{index}" r{index + 1}' for index in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "end"'])


def _wide_schema(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{index}": {"type": "integer"} for index in range(count)},
    }


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_ONE_TOKEN = ', "max_tokens": 1'

ATTACKS: dict[str, Attack] = {
    "32 MB of []": Attack(_COMPLETIONS, _list("prompt", "[]", 11_000_000)),
    "1,000,000 empty strings": Attack(_COMPLETIONS, _list("prompt", '""', 999_000)),
    "999,000 19-digit integers": Attack(
        _COMPLETIONS, _list("prompt", "1234567890123456789", 999_000)
    ),
    "90,000 unknown keys": Attack(
        _COMPLETIONS, lambda: _json(prompt="a", **{f"k{index}": index for index in range(90_000)})
    ),
    "logit_bias of 1,000,000": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", logit_bias={str(index): 1 for index in range(1_000_000)}),
    ),
    "logit_bias of 90,000": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", logit_bias={str(index): 1 for index in range(90_000)}),
    ),
    "stop_token_ids of 900,000": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", stop_token_ids=[index % 500 for index in range(900_000)]),
    ),
    "prompt_logprobs 20, long prompt": Attack(
        _COMPLETIONS,
        lambda: _json(
            prompt=[index % 397 + 20 for index in range(7900)], prompt_logprobs=20, max_tokens=1
        ),
    ),
    "/generate, input logprobs": Attack(
        "/generate",
        lambda: _json(
            input_ids=[index % 399 + 20 for index in range(7900)],
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=20,
            return_text_in_logprobs=True,
            sampling_params={"max_new_tokens": 1},
        ),
    ),
    "16,000 messages": Attack(_CHAT, lambda: _json(messages=[_message()] * 16_000)),
    "49,000 messages": Attack(_CHAT, lambda: _json(messages=[_message()] * 49_000)),
    "/detokenize, 1,000,000 ids": Attack("/detokenize", _list("tokens", "17", 999_000)),
    "10,000 tools": Attack(
        _CHAT, lambda: _chat(max_tokens=1, tools=[_tool(index) for index in range(9000)])
    ),
    "schema as a text of 16 MB of []": Attack(
        _CHAT, lambda: _chat(json_schema='{"enum": [' + "[]," * 5_000_000 + "0]}")
    ),
    "grammar of 20,000 empty lines": Attack(_CHAT, lambda: _chat(guided_grammar="\n" * 20_000)),
    "grammar of 50,000 rules": Attack(_CHAT, lambda: _chat(ebnf=_rules(50_000), max_tokens=4)),
    "/v1/cache/release, 90,000 sessions": Attack(
        "/v1/cache/release", lambda: _json(sessions=[f"s{i}" for i in range(90_000)])
    ),
    "chat_template_kwargs of 90,000": Attack(
        _CHAT,
        lambda: _chat(chat_template_kwargs={f"k{index}": index for index in range(90_000)}),
    ),
}
