"""OpenAI's fields about the prompt cache become sessions, hints and breakpoints."""

from typing import Any

import openai
import pytest

from tests.api.conftest import RunningServer

MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def ask(server: RunningServer, marks: tuple[dict[str, Any], ...] = ({},), **fields: Any) -> Any:
    """The cache hints that the scheduler gets."""
    parts: Any = [{"type": "text", "text": "hi", **mark} for mark in marks]
    messages: Any = [{"role": "user", "content": parts}]
    server.openai.chat.completions.create(model="tiny", messages=messages, extra_body=fields)
    return server.scheduler.requests[-1].options.cache_hints


@pytest.mark.parametrize(
    ("fields", "session", "retained_s"),
    [
        ({}, "", []),
        ({"prompt_cache_key": "agent"}, "agent", []),
        ({"prompt_cache_key": "agent", "cache": {"session": "own"}}, "own", []),
        ({"prompt_cache_retention": "24h"}, "", [86400.0]),
        ({"prompt_cache_retention": "in_memory"}, "", []),
        ({"prompt_cache_options": {"ttl": "30m"}}, "", [1800.0]),
        ({"prompt_cache_options": {"ttl": "30m", "mode": "explicit"}}, "", []),
        ({"prompt_cache_retention": "24h", "cache": {"retain": "high", "ttl_s": 5}}, "", [5.0]),
    ],
)
def test_fields_become_hints(
    server: RunningServer, fields: dict[str, Any], session: str, retained_s: list[float]
) -> None:
    hints = ask(server, **fields)
    assert hints.session.removesuffix(session).strip() == "" or not session
    assert (session in hints.session, [one.ttl_s for one in hints.retain]) == (True, retained_s)


def test_breakpoints_retain_the_prompt_before_them(server: RunningServer) -> None:
    (retention,) = ask(server, ({}, MARK)).retain
    assert (retention.level, retention.ttl_s) == ("high", 1800.0) and retention.num_tokens > 0
    longer = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    (retention,) = ask(server, (MARK, longer)).retain
    assert retention.ttl_s == 43200.0
    assert len(ask(server, (MARK,) * 6).retain) == 1


def test_breakpoints_of_responses(server: RunningServer) -> None:
    parts: Any = [{"type": "input_text", "text": "hi", **MARK}]
    server.openai.responses.create(model="tiny", input=[{"role": "user", "content": parts}])
    assert server.scheduler.requests[-1].options.cache_hints.retain[0].ttl_s == 1800.0


@pytest.mark.parametrize(
    ("mark", "fields", "param"),
    [
        ({}, {"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({}, {"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
        ({}, {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({}, {"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ({"prompt_cache_breakpoint": {}}, {}, "messages[0].content[0].prompt_cache_breakpoint"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": 3}}, {}, "messages[0].content[0].prompt_cache_breakpoint"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(
    server: RunningServer, mark: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, (mark,), **fields)
    assert error.value.param == param
