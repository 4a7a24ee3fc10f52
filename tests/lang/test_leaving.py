"""Whoever leaves takes the work along, and whatever dies says so: cancellation and lost servers."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import radixrt.lang as rl
from radixrt import LLM
from radixrt.base.errors import EngineDiedError
from tests.servers import Server, run_server


@rl.function(temperature=0, max_tokens=24)
def ask(s: rl.State) -> None:
    s += rl.user("The owner of Vidur is Noval. What is the owner of Vidur?")
    s += rl.assistant(rl.gen("answer"))


@rl.function(max_tokens=2000, temperature=1.0)
def endless(s: rl.State, number: int = 0) -> None:
    s += rl.user(f"Tell me {number}.") + rl.assistant(rl.gen("x", regex="[a-z ]{1500,}"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_idle(server: Server) -> bool:
    stats = server.info(check_invariants=True)["stats"]
    return stats["running"] == stats["waiting"] == 0


def test_leaving_a_stream_ends_the_call_on_the_server(server: Server, backend: rl.Server) -> None:
    with endless.stream(backend=backend) as stream:
        for number, _ in enumerate(stream.text_iter("x")):
            if number == 3:
                assert not is_idle(server)
                break
    wait_until(lambda: is_idle(server))


def test_an_error_in_a_program_ends_its_calls_on_the_server(
    server: Server, backend: rl.Server
) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        forks = s.fork(3)
        for fork in forks:
            endless(fork)
        wait_until(lambda: server.info()["stats"]["running"] == 3)
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        program.run(backend=backend)
    wait_until(lambda: is_idle(server))


def test_a_cancelled_fork_ends_its_call_on_the_server(server: Server, backend: rl.Server) -> None:
    @rl.function
    def program(s: rl.State) -> None:
        one, two = s.fork(2)
        endless(one)
        ask(two)
        assert "Noval" in two["answer"]
        one.cancel()

    program.run(backend=backend)
    wait_until(lambda: is_idle(server))


def test_a_server_that_dies_loses_no_finished_result_of_the_batch() -> None:
    server = run_server(Path("demo"), "--log-level", "warning")
    try:
        server.start()
        finished = threading.Event()

        @rl.function(temperature=0)
        def program(s: rl.State, lasts: bool) -> str:
            if not lasts:
                ask(s)
                answer: str = s["answer"]
                finished.set()
                return answer
            endless(s)
            finished.wait(30)
            server.process.kill()
            return s["x"]

        inputs = [{"lasts": number == 1} for number in range(3)]
        one, failed, three = program.run_batch(inputs, backend=server.url, progress=False)
        assert isinstance(failed, rl.FailedRun) and isinstance(failed.error, rl.BackendError)
        assert isinstance(failed.error, rl.ConnectionLost | rl.ServerFailed)
        assert "in endless" in str(failed.error)
        results = [state.result for state in (one, three) if isinstance(state, rl.State)]
        assert results and set(results) == {"The owner of Vidur is Noval."}
    finally:
        server.remove()


def test_a_stream_that_ends_in_the_middle_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                received = connection.recv(65536)
                while not received.endswith(b"}"):  # what is left unread would reset the connection
                    received += connection.recv(65536)
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
                    b'data: {"choices": [{"index": 0, "text": "half"}]}\n\n'
                )

        threading.Thread(target=answer_half, daemon=True).start()

        def program(s: rl.State) -> None:
            s += "a" + rl.gen("x", stream=True)

        with pytest.raises(rl.ConnectionLost, match="middle"):
            rl.function(program).run(backend=f"http://127.0.0.1:{port}")


def test_an_engine_that_is_closed_ends_the_programs_that_it_answers_and_leaves_no_process() -> None:
    errors: list[Exception] = []

    def run(streamed: bool) -> None:
        with pytest.raises(rl.BackendError) as failure:
            if streamed:
                list(endless.stream(backend=backend))
            else:
                endless.run(backend=backend)
        errors.append(failure.value)

    with LLM(max_total_tokens=16384) as llm:
        backend = rl.Engine(llm)
        family = [psutil.Process(pid) for pid in llm._engine.pids.values()]
        threads = [threading.Thread(target=run, args=(number % 2 == 0,)) for number in range(10)]
        for thread in threads:
            thread.start()
        wait_until(lambda: llm.stats().running > 0)
    assert len(family) == 3 and not any(process.is_running() for process in family)
    llm.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 10
    with pytest.raises(rl.ConnectionLost, match="closed"):
        ask.run(backend=backend)
    with pytest.raises(EngineDiedError, match="closed"):
        llm.generate("a")
