"""/generate, /tokenize and /detokenize."""

import itertools
import json
from typing import Any

import pytest

from tests.api.conftest import RunningServer


def post(server: RunningServer, path: str, **body: object) -> Any:
    with server.http as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_comes_with_its_meta_info(server: RunningServer) -> None:
    result = post(server, "/generate", text="the fox", rid="me")
    meta = result["meta_info"]
    assert result["text"] == "Hello world" and result["output_ids"][-1] == 1
    assert meta["id"] == "me"
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert meta["cached_tokens"] == 7
    assert meta["completion_tokens"] == len(result["output_ids"])
    assert meta["prompt_tokens"] == len(server.vocabulary.encode("the fox", False))
    assert meta["queue_time"] == 0.001 and meta["prefill_time"] == 0.002
    assert meta["e2e_latency"] > 0


def test_a_batch_gives_a_list_in_order(server: RunningServer) -> None:
    settings = [{"max_new_tokens": 2}, {"max_new_tokens": 3}]
    results = post(server, "/generate", input_ids=[[5, 6], [7]], sampling_params=settings)
    assert [r["meta_info"]["completion_tokens"] for r in results] == [2, 3]
    assert [r["meta_info"]["prompt_tokens"] for r in results] == [2, 1]
    assert results[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_answers_stand_in_the_order_of_prompts_that_want_different_numbers_of_them(
    server: RunningServer,
) -> None:
    settings = [{"n": n, "max_new_tokens": 2} for n in (1, 3, 1)]
    results = post(
        server, "/generate", input_ids=[[5], [5, 6], [5, 6, 7]], sampling_params=settings
    )
    assert [r["meta_info"]["prompt_tokens"] for r in results] == [1, 2, 2, 2, 3]


def test_each_event_of_a_stream_repeats_the_answer_so_far(server: RunningServer) -> None:
    with server.http as http:
        lines = [
            line.removeprefix("data: ")
            for line in http.post(
                "/generate", json={"text": "hi", "stream": True}
            ).text.splitlines()
            if line
        ]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts[-1] == "Hello world"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(texts) > 2


def test_logprobs_of_answer_and_prompt(server: RunningServer) -> None:
    meta = post(
        server,
        "/generate",
        text="the fox",
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )["meta_info"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == "Hello world<|im_end|>"
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == "the fox"
    assert meta["input_token_logprobs"][0][0] is None
    assert [lp for lp, _, _ in meta["output_top_logprobs"][0]] == [-0.1, -0.2]


def test_sampling_params_have_sglangs_names(server: RunningServer) -> None:
    settings = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 3, "no_stop_trim": True}
    settings |= {"allowed_token_ids": [5], "bad_words": ["of the"]}
    post(server, "/generate", text="hi", sampling_params=settings)
    sampling = server.scheduler.requests[-1].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 3)
    assert sampling.include_stop_str_in_output and sampling.allowed_token_ids == (5,)
    assert tuple(server.vocabulary.encode("of the", False)) in sampling.bad_words_token_ids


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": []}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "temperature"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"bad_words": [""]}}, "sampling_params.bad_words"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "different"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "1 entries for 2 prompts"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 900}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": "x"}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}},
            "min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
        ({"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "a", "extra_key": "x"}, "extra_key"),
    ],
)
def test_bad_native_requests_are_explained(
    server: RunningServer, body: dict[str, Any], words: str
) -> None:
    with server.http as http:
        response = http.post("/generate", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_prompt_can_be_scored_without_an_answer(server: RunningServer) -> None:
    result = post(
        server,
        "/generate",
        text="the fox",
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )
    meta = result["meta_info"]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == "the fox"
    assert (result["text"], result["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert meta["completion_tokens"] == 0
    assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_each_prompt_of_a_batch_may_have_settings_of_its_own(server: RunningServer) -> None:
    results = post(
        server,
        "/generate",
        text=["the fox", "the dog", "the world"],
        rid=["a", "b", "c"],
        sampling_params=[{"max_new_tokens": 0}, {"max_tokens": 2}, {"max_new_tokens": 3}],
        return_logprob=[True, True, False],
        logprob_start_len=[0, -1, 0],
        top_logprobs_num=[1, 2, 3],
    )
    metas = [result["meta_info"] for result in results]
    assert [meta["id"] for meta in metas] == ["a", "b", "c"]
    assert [meta["completion_tokens"] for meta in metas] == [0, 2, 3]
    assert ["input_token_logprobs" in meta for meta in metas] == [True, False, False]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, True, False]
    assert [len(top) for top in metas[1]["output_top_logprobs"]] == [2, 2]


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/tokenize", {"prompt": "x" * 262_145}, "262144"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 262_145}]}, "262144"),
        ("/detokenize", {"tokens": [5] * 65_537}, "65536"),
    ],
)
def test_too_much_to_tokenize_or_detokenize_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], limit: str
) -> None:
    with server.http as http:
        response = http.post(path, json=body)
    assert response.status_code == 413
    assert limit in response.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "naïve café 你好"
    tokens = post(server, "/tokenize", prompt=text)["tokens"]
    assert tokens == server.vocabulary.encode(text, add_special_tokens=False)
    assert post(server, "/detokenize", tokens=tokens)["prompt"] == text
    assert post(server, "/detokenize", tokens=[])["prompt"] == ""


def test_tokenize_renders_a_conversation(server: RunningServer) -> None:
    reply = post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert reply["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 512


def test_tokenize_counts_a_text_longer_than_the_context(server: RunningServer) -> None:
    assert post(server, "/tokenize", prompt="the fox " * 20_000)["count"] > 512
