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
    "49,000 empty objects": Attack(_COMPLETIONS, _list("prompt", "{}", 49_000)),
    "1,000,000 empty strings": Attack(_COMPLETIONS, _list("prompt", '""', 999_000)),
    "4,000,000 empty strings": Attack(_COMPLETIONS, _list("prompt", '""', 4_000_000)),
    "1,000,000 token ids": Attack(_COMPLETIONS, _list("prompt", "17", 999_000)),
    "1,600,000 19-digit integers": Attack(
        _COMPLETIONS, _list("prompt", "1234567890123456789", 1_600_000)
    ),
    "999,000 19-digit integers": Attack(
        _COMPLETIONS, _list("prompt", "1234567890123456789", 999_000)
    ),
    "32 MB of text": Attack(_COMPLETIONS, lambda: _json(prompt="word " * 6_500_000)),
    "32 MB of escapes": Attack(
        _COMPLETIONS, lambda: b'{"prompt": "' + rb"\u00e9" * 5_500_000 + b'"}'
    ),
    "32 MB of brackets in a text": Attack(_COMPLETIONS, lambda: _json(prompt="[]" * 16_000_000)),
    "1,000,000 unknown keys": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", **{f"k{index}": index for index in range(1_000_000)}),
    ),
    "90,000 unknown keys": Attack(
        _COMPLETIONS, lambda: _json(prompt="a", **{f"k{index}": index for index in range(90_000)})
    ),
    "4,000 prompts": Attack(_COMPLETIONS, _list("prompt", '"Hello"', 4000, _ONE_TOKEN)),
    "4,000 prompts of token ids": Attack(
        _COMPLETIONS, _list("prompt", "[17,18]", 4000, _ONE_TOKEN)
    ),
    "30 prompts, n=128": Attack(
        _COMPLETIONS, _list("prompt", '"Hello"', 30, _ONE_TOKEN + ', "n": 128')
    ),
    "logit_bias of 1,000,000": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", logit_bias={str(index): 1 for index in range(1_000_000)}),
    ),
    "logit_bias of 90,000": Attack(
        _COMPLETIONS,
        lambda: _json(prompt="a", logit_bias={str(index): 1 for index in range(90_000)}),
    ),
    "logit_bias of 1,000, n=128": Attack(
        _COMPLETIONS,
        lambda: _json(
            prompt="a",
            n=128,
            max_tokens=1,
            logit_bias={str(index): 1 for index in range(100, 1000)},
        ),
    ),
    "stop of 900,000": Attack(_COMPLETIONS, _list("stop", '"x"', 900_000, ', "prompt": "a"')),
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
    "echo with logprobs 20, streamed": Attack(
        _COMPLETIONS,
        lambda: _json(
            prompt=[index % 398 + 20 for index in range(7900)],
            logprobs=20,
            echo=True,
            max_tokens=1,
            stream=True,
        ),
    ),
    "logprobs 20 of 3,000 tokens": Attack(
        _COMPLETIONS, lambda: _json(prompt="a", logprobs=20, max_tokens=3000, ignore_eos=True)
    ),
    "chat, top_logprobs 20 of 3,000 tokens": Attack(
        _CHAT,
        lambda: _chat(logprobs=True, top_logprobs=20, max_tokens=3000, ignore_eos=True),
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
    "/generate, streamed logprobs": Attack(
        "/generate",
        lambda: _json(
            text="a",
            stream=True,
            return_logprob=True,
            top_logprobs_num=20,
            sampling_params={"max_new_tokens": 1000, "ignore_eos": True},
        ),
    ),
    "/generate, 4,000 texts": Attack(
        "/generate", _list("text", '"Hello"', 4000, ', "sampling_params": {"max_new_tokens": 1}')
    ),
    "/generate, 4,000 settings": Attack(
        "/generate",
        lambda: _json(
            text=["Hello"] * 4000,
            sampling_params=[{"max_new_tokens": 1, "seed": index} for index in range(4000)],
        ),
    ),
    "16,000 messages": Attack(_CHAT, lambda: _json(messages=[_message()] * 16_000)),
    "49,000 messages": Attack(_CHAT, lambda: _json(messages=[_message()] * 49_000)),
    "45,000 parts of a message": Attack(
        _CHAT,
        lambda: _json(
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 45_000}]
        ),
    ),
    "30 MB in one message": Attack(_CHAT, lambda: _json(messages=[_message("word " * 6_000_000)])),
    "special tokens in a message": Attack(
        _CHAT, lambda: _json(messages=[_message("<|im_end|>" * 3_000_000)])
    ),
    "/tokenize, 200,000 characters": Attack(
        "/tokenize", lambda: _json(prompt="A few words, and 12 numbers. " * 6800)
    ),
    "/tokenize, 32 MB": Attack("/tokenize", lambda: _json(prompt="word " * 6_500_000)),
    "/tokenize, 16,000 messages": Attack(
        "/tokenize", lambda: _json(messages=[_message()] * 16_000)
    ),
    "/detokenize, 1,000,000 ids": Attack("/detokenize", _list("tokens", "17", 999_000)),
    "/detokenize, 65,000 ids": Attack("/detokenize", _list("tokens", "17", 65_000)),
    "conversation of 16,000 messages": Attack(
        "/v1/conversations", lambda: _json(messages=[_message()] * 16_000)
    ),
    "conversation of 30 MB": Attack("/v1/conversations", lambda: _json(prompt="word " * 6_000_000)),
    "100 tools of 100 parameters": Attack(
        _CHAT, lambda: _chat(max_tokens=1, tools=[_tool(index, 100) for index in range(100)])
    ),
    "10,000 tools": Attack(
        _CHAT, lambda: _chat(max_tokens=1, tools=[_tool(index) for index in range(9000)])
    ),
    "schema of 20,000 properties": Attack(
        _CHAT,
        lambda: _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _wide_schema(20_000)},
            }
        ),
    ),
    "schema with an enum of 90,000": Attack(
        _CHAT,
        lambda: _chat(guided_json={"type": "string", "enum": [f"v{i}" for i in range(90_000)]}),
    ),
    "schema as a text of 16 MB of []": Attack(
        _CHAT, lambda: _chat(json_schema='{"enum": [' + "[]," * 5_000_000 + "0]}")
    ),
    "choice of 90,000": Attack(
        _CHAT, lambda: _chat(guided_choice=[f"v{index}" for index in range(90_000)])
    ),
    "regex of 16 MB": Attack(_CHAT, lambda: _chat(guided_regex="(abc|x)?" * 2_000_000)),
    "grammar of 20,000 empty lines": Attack(_CHAT, lambda: _chat(guided_grammar="\n" * 20_000)),
    "grammar of 50,000 rules": Attack(_CHAT, lambda: _chat(ebnf=_rules(50_000), max_tokens=4)),
    "/v1/grammar/compile, 5,000 rules": Attack(
        "/v1/grammar/compile", lambda: _json(ebnf=_rules(5000))
    ),
    "/score_choices, 4,000": Attack(
        "/score_choices", lambda: _json(prompt="a", choices=[f"c{i}" for i in range(4000)])
    ),
    "/v1/cache/release, 1,024 sessions": Attack(
        "/v1/cache/release", lambda: _json(sessions=[f"s{i}" for i in range(1024)])
    ),
    "/v1/cache/release, 90,000 sessions": Attack(
        "/v1/cache/release", lambda: _json(sessions=[f"s{i}" for i in range(90_000)])
    ),
    "/v1/cache/warm, 1,000,000 ids": Attack("/v1/cache/warm", _list("token_ids", "17", 999_000)),
    "chat_template_kwargs of 90,000": Attack(
        _CHAT,
        lambda: _chat(chat_template_kwargs={f"k{index}": index for index in range(90_000)}),
    ),
}
