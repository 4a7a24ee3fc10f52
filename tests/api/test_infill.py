"""Filling in the middle: ``suffix`` of completions and of Ollama's ``/api/generate``, and
llama.cpp's ``/infill``."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from radixrt.messages.ids import unpack_ids
from tests.api.conftest import RunningServer, StartServer
from tests.checkpoints.tiny_tokenizers import CHATML, save_byte_level
from tests.tokenizer.test_fill_in_middle import QWEN

WRITTEN = "<|fim_prefix|>the <|fim_suffix|> end<|fim_middle|>"


@pytest.fixture(scope="module")
def coder(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    yield start_server(
        model=save_byte_level(tmp_path_factory.mktemp("coder"), CHATML, special_tokens=QWEN)
    )


def prompt_of(server: RunningServer) -> str:
    return server.vocabulary.decode(unpack_ids(server.scheduler.requests[-1].token_ids).tolist())


def test_a_completion_with_a_suffix_fills_the_gap(coder: RunningServer) -> None:
    coder.answer_with("and of")
    (choice,) = coder.openai.completions.create(model="tiny", prompt="the ", suffix=" end").choices
    assert (choice.text, choice.finish_reason) == ("and of", "stop")
    assert prompt_of(coder) == WRITTEN
    stream = coder.openai.completions.create(
        model="tiny", prompt="the ", suffix=" end", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "and of"


def test_the_gap_ends_at_the_tokens_of_the_family(coder: RunningServer) -> None:
    coder.answer_with("and of<|file_sep|>x")
    (choice,) = coder.openai.completions.create(model="tiny", prompt="the ", suffix=" end").choices
    assert (choice.text, choice.finish_reason) == ("and of", "stop")


def test_ollama_fills_the_gap(coder: RunningServer) -> None:
    coder.answer_with("and of")
    answer = ollama.Client(host=coder.url).generate("tiny", "the ", suffix=" end")
    assert answer.response == "and of" and prompt_of(coder) == WRITTEN


@pytest.mark.parametrize("stream", [False, True])
def test_infill_answers_as_llama_cpp_does(coder: RunningServer, stream: bool) -> None:
    coder.answer_with("and of")
    body = {
        "input_prefix": "the ",
        "input_suffix": " end",
        "input_extra": [{"filename": "a.py", "text": "in"}],
        "prompt": "is",
        "n_predict": 20,
        "stream": stream,
    }
    response = coder.http.post("/infill", json=body)
    assert response.status_code == 200, response.text
    texts = [response.text]
    if stream:
        lines = response.text.splitlines()
        texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert len(texts) > 1
    objects = [json.loads(text) for text in texts]
    assert "".join(one["content"] for one in objects) == "and of"
    assert [one["stop"] for one in objects] == [False] * (len(objects) - 1) + [True]
    last = objects[-1]
    assert (last["stop_type"], last["stopping_word"], last["tokens_cached"]) == ("eos", "", 7)
    files = "<|repo_name|>myproject\n<|file_sep|>a.py\nin<|file_sep|>filename\n"
    assert prompt_of(coder) == f"{files}{WRITTEN}is"
    request = coder.scheduler.requests[-1]
    assert last["tokens_evaluated"] == len(unpack_ids(request.token_ids))
    assert request.sampling.max_tokens == 20


def test_infill_ends_at_limits_and_words(coder: RunningServer) -> None:
    coder.answer_with("and of")
    short = coder.http.post("/infill", json={"input_prefix": "the", "n_predict": 1}).json()
    assert (short["stop_type"], short["tokens_predicted"]) == ("limit", 1)
    word = coder.http.post("/infill", json={"input_prefix": "the", "stop": [" of"]}).json()
    assert (word["stop_type"], word["stopping_word"], word["content"]) == ("word", " of", "and")
    assert coder.scheduler.requests[-1].sampling.max_tokens > 400  # as many as fit


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "a", "suffix": "b", "keep": True}, "keep"),
    ("/v1/completions", {"prompt": [5], "suffix": "b"}, "prompt"),
    ("/infill", {"input_prefix": "a", "n": 2}, "n"),
    ("/infill", {"input_prefix": "a", "keep": True}, "keep"),
    ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_what_does_not_fit_is_refused(
    coder: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = coder.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_model_without_fim_tokens_says_so(server: RunningServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "a", "suffix": "b"}), ("/infill", {})):
        error = server.http.post(path, json=body).json()["error"]
        assert "FIM tokens" in error["message"] and error["param"] == "suffix"
