"""No request outlives its client, however the client leaves; no client suffers from another's
end."""

import asyncio
import socket
import threading

import httpx
import openai
import pytest

from radixrt.messages.sequences import SequenceRefused
from tests.api.conftest import RunningServer, StartServer, send, wait_until


def test_a_client_that_leaves_mid_stream_frees_its_sequences(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.02
    stream = server.openai.completions.create(
        model="tiny", prompt="hi", n=3, max_tokens=500, stream=True
    )
    next(iter(stream))
    wait_until(lambda: server.scheduler.num_running == 3)
    stream.close()
    wait_until(lambda: len(server.scheduler.released) == 3)
    assert server.scheduler.num_running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_gives_up_waiting_frees_its_sequence(
    server: RunningServer, path: str
) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.01
    body = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 500},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 500}},
    }[path]
    with send(server, body, path=path):
        wait_until(lambda: server.scheduler.num_running == 1)
    wait_until(lambda: len(server.scheduler.released) == 1)


def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(
    server: RunningServer,
) -> None:
    server.scheduler.paused.set()
    try:
        with send(server, {"prompt": "hi", "stream": True}):
            wait_until(lambda: server.scheduler.num_running == 1)
        wait_until(lambda: len(server.scheduler.released) == 1)
    finally:
        server.scheduler.paused.clear()


def test_a_client_that_leaves_mid_body_harms_nobody(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"
        )
    answer = server.openai.completions.create(model="tiny", prompt="hi")
    assert answer.choices[0].text == "Hello world"


def test_an_abort_by_id_ends_the_answer_with_what_there_is(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.01
    results = []

    def generate() -> None:
        body = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 500}}
        with server.http as http:
            results.append(http.post("/generate", json=body).json())

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: server.scheduler.num_running == 1)
    with server.http as http:
        assert http.post("/abort_request", json={"rid": "mine"}).status_code == 200
    thread.join(20)
    assert results[0]["meta_info"]["finish_reason"] == {"type": "abort"}
    wait_until(lambda: len(server.scheduler.released) == 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["rid", "request_id", None])
def test_an_openai_request_can_be_aborted_by_its_id(
    server: RunningServer, path: str, name: str | None
) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.02
    body = {"prompt": ["a", "b"], "messages": [{"role": "user", "content": "hi"}]}
    body |= {"stream": True, "max_tokens": 400} | ({name: "mine"} if name else {})
    with (
        server.http as http,
        server.http as other,
        http.stream("POST", path, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        rid = answer.headers["x-request-id"]
        assert rid == "mine" or name is None
        again = other.post(path, json=body | {"rid": rid, "stream": False})
        assert again.status_code == 400 and "in flight" in again.text
        assert other.post("/abort_request", json={"rid": rid}).status_code == 200
        assert '"finish_reason":"abort"' in "".join(lines)
    wait_until(lambda: server.scheduler.num_running == 0)


def test_an_abort_reaches_prompts_that_have_not_begun(start_server: StartServer) -> None:
    server = start_server(max_running_requests=2)
    server.answer_endlessly()
    server.scheduler.step_s = 0.01
    responses = []

    def complete() -> None:
        body = {"prompt": ["a"] * 9, "max_tokens": 500, "rid": "mine"}
        with server.http as http:
            responses.append(http.post("/v1/completions", json=body))

    thread = threading.Thread(target=complete)
    thread.start()
    wait_until(lambda: server.scheduler.num_running == 2)
    with server.http as http:
        http.post("/abort_request", json={"rid": "mine"})
    thread.join(20)
    assert responses[0].json()["error"]["code"] == "request_aborted"
    assert len(server.scheduler.requests) == 2


def test_a_batch_leaves_the_engine_room_for_others(start_server: StartServer) -> None:
    server = start_server(max_running_requests=4)
    server.answer_endlessly()
    most = []
    server.scheduler.refuse = lambda request: most.append(server.scheduler.num_running)
    answer = server.openai.completions.create(model="tiny", prompt=["a"] * 30, n=2, max_tokens=5)
    assert len(answer.choices) == 60 and max(most) < 4


def test_an_abort_of_an_unknown_id_is_ignored(server: RunningServer) -> None:
    with server.http as http:
        assert http.post("/abort_request", json={"rid": "nobody"}).status_code == 200


def test_an_id_in_use_is_refused_and_its_owner_unharmed(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.paused.set()
    body = {"text": "hi", "rid": "same", "sampling_params": {"max_new_tokens": 100}}
    with server.http as http, server.http as other:
        thread_result: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: thread_result.append(http.post("/generate", json=body))
        )
        thread.start()
        wait_until(lambda: server.scheduler.num_running == 1)
        assert other.post("/generate", json=body).status_code == 400
        server.scheduler.paused.clear()
        thread.join(20)
    assert thread_result[0].json()["meta_info"]["completion_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_scheduler_is_an_error_status_even_of_a_stream(
    server: RunningServer, stream: bool
) -> None:
    server.scheduler.refuse = lambda request: SequenceRefused(
        seq_id=request.seq_id, message="The queue is full.", status=503, retry_after_s=3
    )
    with pytest.raises(openai.APIStatusError) as caught:
        server.openai.completions.create(model="tiny", prompt="hi", stream=stream)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"
    assert "queue is full" in caught.value.message


def test_when_one_of_n_answers_is_refused_the_others_are_released(server: RunningServer) -> None:
    server.answer_endlessly()
    server.scheduler.step_s = 0.02
    first = []

    def refuse_the_third(request):  # type: ignore[no-untyped-def]
        first.append(request)
        if len(first) == 3:
            return SequenceRefused(seq_id=request.seq_id, message="Full.", status=503)
        return None

    server.scheduler.refuse = refuse_the_third
    with pytest.raises(openai.APIStatusError):
        server.openai.completions.create(model="tiny", prompt="hi", n=4, max_tokens=400)
    wait_until(lambda: len(server.scheduler.released) == 3)
    assert server.scheduler.num_running == 0


def test_sixty_four_at_once_with_some_that_leave(server: RunningServer) -> None:
    server.answer_endlessly("Hello world. ")
    server.scheduler.step_s = 0.01
    asyncio.run(_sixty_four(server))
    wait_until(lambda: server.scheduler.num_running == 0)
    assert len(server.scheduler.released) >= 16


async def _sixty_four(server: RunningServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def one(number: int) -> None:
        kind = number % 4
        if kind == 0:
            answer = await client.completions.create(
                model="tiny", prompt=f"a{number}", max_tokens=30
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 30
        elif kind == 1:
            stream = await client.completions.create(
                model="tiny", prompt="b", max_tokens=30, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text.startswith("Hello world. Hello")
        elif kind == 2:
            stream = await client.completions.create(
                model="tiny", prompt="c", max_tokens=400, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        else:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="tiny", prompt="d", temperature=-1)

    await asyncio.gather(*map(one, range(64)))
    await client.close()
