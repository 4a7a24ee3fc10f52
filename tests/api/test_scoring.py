"""A prompt that is sent once is scored with each of several texts behind it, and one that is kept
need not be sent."""

from typing import Any

import pytest

from radixrt.client import choice_scoring
from radixrt.messages.ids import unpack_ids
from tests.api.conftest import RunningServer

PROMPT = "The cat sat on the"
CHOICES = [" mat", " table", " mattress"]


@pytest.fixture(autouse=True)
def nothing_was_sent(server: RunningServer) -> None:
    server.scheduler.requests.clear()


def post(server: RunningServer, path: str, body: object) -> tuple[int, dict[str, Any]]:
    with server.http as http:
        response = http.post(path, json=body)
    return response.status_code, response.json()


def texts_sent(server: RunningServer) -> list[str]:
    """The sequences that the scheduler was given since the last look."""
    texts = [
        server.vocabulary.decode(unpack_ids(r.token_ids).tolist())
        for r in server.scheduler.requests
    ]
    server.scheduler.requests.clear()
    return texts


def test_each_text_stands_behind_the_prompt_and_is_scored_from_where_they_part(
    server: RunningServer,
) -> None:
    status, answer = post(
        server, "/score_choices", {"prompt": PROMPT, "choices": CHOICES, "rid": "me"}
    )
    assert status == 200 and answer["id"] == "me"
    alone = len(server.vocabulary.encode(PROMPT, True))
    requests = list(server.scheduler.requests)
    assert sorted(texts_sent(server)) == sorted(PROMPT + choice for choice in CHOICES)
    (start,) = {request.sampling.prompt_logprobs_start for request in requests}
    assert alone - 2 <= start <= alone
    by_text = {server.vocabulary.decode(unpack_ids(r.token_ids).tolist()): r for r in requests}
    for choice, score in zip(CHOICES, answer["scores"], strict=True):
        num_tokens = len(unpack_ids(by_text[PROMPT + choice].token_ids))
        assert len(score["logprobs"]) == num_tokens - start
        assert score["unconditional_logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == alone


def test_without_the_prompt_its_first_token_stands_alone(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "choices": CHOICES, "unconditional": True}
    status, answer = post(server, "/score_choices", body)
    assert status == 200
    texts = texts_sent(server)
    assert len(texts) == 2 * len(CHOICES)
    assert sum(len(text) < len(PROMPT) for text in texts) == len(CHOICES)
    for score in answer["scores"]:
        assert len(score["unconditional_logprobs"]) == len(score["logprobs"])


@pytest.mark.parametrize("continues", [False, True])
def test_of_a_conversation_a_text_is_the_assistants(server: RunningServer, continues: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    if continues:
        messages.append({"role": "assistant", "content": "The answer:"})
    body = {"messages": messages, "choices": [" yes", " no"], "continue_final_message": continues}
    assert post(server, "/score_choices", body)[0] == 200
    said = "The answer:" if continues else ""
    ends = {f"assistant\n{said}{choice}" for choice in body["choices"]}
    assert {text[text.index("assistant\n") :] for text in texts_sent(server)} == ends


@pytest.mark.parametrize("tail_chars", range(16, 26))
def test_of_long_texts_only_the_end_is_encoded_anew_to_the_same_tokens(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, tail_chars: int
) -> None:
    monkeypatch.setattr(choice_scoring, "TAIL_CHARS", tail_chars)
    text = "The quick brown fox jumps over the lazy dog, and the cat sat on the"
    assert post(server, "/score_choices", {"prompt": text, "choices": CHOICES})[0] == 200
    sent = {tuple(unpack_ids(r.token_ids).tolist()) for r in server.scheduler.requests}
    assert sent == {tuple(server.vocabulary.encode(text + choice, True)) for choice in CHOICES}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "choices": []}, "choices"),
        ({"prompt": "x", "choices": ["a", ""]}, "choices[1]"),
        ({"prompt": "x"}, "choices"),
        ({"choices": ["a"]}, "messages"),
        ({"prompt": "x", "messages": [], "choices": ["a"]}, "messages"),
        ({"prompt": "x", "choices": ["a"], "cache": {"session": ""}}, "cache.session"),
        ({"prompt": "x", "choices": ["a"], "continue_from": "gone"}, "continue_from"),
        ({"prompt": "x " * 9000, "choices": ["a"]}, "prompt"),
    ],
)
def test_what_can_not_be_scored_is_refused(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    status, answer = post(server, "/score_choices", body)
    assert status in (400, 404, 413) and answer["error"]["param"] == param, answer


# ---------------------------------------------------------------- what is kept ahead


def test_a_kept_prompt_is_gone_on_from_by_all_that_name_it(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "A long story"}, {"role": "assistant", "content": "So"}]
    status, kept = post(server, "/v1/conversations", {"messages": messages})
    assert status == 200 and kept["kept"] is True and kept["length"] == 2
    assert not server.scheduler.requests  # nothing is computed
    new = [{"role": "user", "content": "And?"}]
    going_on = {"continue_from": kept["id"], "max_tokens": 3}
    for extra, path in [
        ({"choices": ["a"]}, "/score_choices"),
        ({}, "/v1/chat/completions"),
        ({}, "/v1/cache/warm"),
    ]:
        server.scheduler.requests.clear()
        whole = {"messages": [*messages, *new], "max_tokens": 3} | extra
        assert post(server, path, whole)[0] == 200
        assert post(server, path, {"messages": new} | going_on | extra)[0] == 200
        one, other = (bytes(request.token_ids) for request in server.scheduler.requests)
        assert one == other
    server.scheduler.requests.clear()


def test_a_kept_text_may_go_on_from_another(server: RunningServer) -> None:
    _, first = post(server, "/v1/conversations", {"prompt": "one two "})
    body = {"prompt": "three", "continue_from": first["id"], "continue_after": 4}
    status, second = post(server, "/v1/conversations", body)
    assert status == 200 and second["length"] == len("one three")
    going_on = {"prompt": " four", "continue_from": second["id"], "max_tokens": 3}
    assert post(server, "/v1/completions", going_on)[0] == 200
    assert texts_sent(server) == ["one three four"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "continue_from": "gone"}, "continue_from"),
        ({"prompt": "x", "continue_after": 3}, "continue_after"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_can_not_be_kept_is_refused(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    status, answer = post(server, "/v1/conversations", body)
    assert status in (400, 404) and answer["error"]["param"] == param
