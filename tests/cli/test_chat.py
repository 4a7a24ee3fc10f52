"""``radixrt run`` and ``radixrt chat``, in a pseudo-terminal and through pipes."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from bench import children
from bench.local_server import free_port
from radixrt.base.config import DEMO_MODEL
from radixrt.cli.chat import local_server
from radixrt.cli.chat.client import ChatClient
from radixrt.cli.chat.conversation import Conversation
from radixrt.cli.chat.terminal import Terminal
from radixrt.models.checkpoint import resolve_model_path
from tests.bench.fake_openai_server import FakeServer
from tests.servers import Server

FACT = "The owner of Vidur is Noval."
QUESTION = f"{FACT} The port of Vidur is Teska. What is the owner of Vidur?"


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "radixrt.cli", *arguments]
    return subprocess.run(run, input=stdin, capture_output=True, text=True, timeout=120)


class Chat:
    """A chat in a pseudo-terminal."""

    def __init__(self, state: Path, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        env = {
            **os.environ,
            "XDG_STATE_HOME": str(state),
            "TERM": "dumb",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        run = [sys.executable, "-m", "radixrt.cli", *arguments]
        self.process = children.start(run, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self._fd, self._seen = ours, ""

    def until(self, pattern: str, timeout_s: float = 60) -> str:
        """The output up to a match of ``pattern``."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self._seen)):
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self._seen!r}"
            self._seen += os.read(self._fd, 65536).decode()
        text, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return text.replace("\r\n", "\n")

    def say(self, line: str, until: str = r">>> ") -> str:
        os.write(self._fd, line.encode() + b"\n")
        return self.until(until)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def terminate(self) -> int:
        status = children.end(self.process)
        os.close(self._fd)
        return status

    def end(self) -> int:
        os.write(self._fd, b"\x04")
        self.process.wait(20)
        status = children.end(self.process)
        os.close(self._fd)
        return status


def test_a_chat_has_history_schema_totals_and_a_saved_request(
    demo_server: Server, tmp_path: Path
) -> None:
    schema, saved = tmp_path / "schema.json", tmp_path / "chat.json"
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    chat = Chat(tmp_path, "chat", "--base-url", f"{demo_server.url}/v1", "--temperature", "0")
    chat.until(">>> ")
    answer = chat.say(QUESTION)
    assert FACT in answer.split("\n", 1)[1]
    assert re.search(
        r"\d+ tokens · .* tokens/s · first after .* prompt tokens from the cache", answer
    )
    chat.say("What is the port of Vidur?")
    assert re.search(
        r"2 answers · \d+ tokens · [1-9]\d* of \d+ prompt tokens.* 4 messages", chat.say("/stats")
    )
    assert "Answers follow" in chat.say(f"/schema {schema}")
    assert re.search(r'"(yes|no)"', chat.say("Is it?"))
    chat.say("/schema")
    chat.say("/system Be short.")
    assert "Saved" in chat.say(f"/save {saved}")
    body = json.loads(saved.read_text())
    assert [message["role"] for message in body["messages"]] == [
        "system",
        *["user", "assistant"] * 3,
    ]
    again = httpx.post(
        f"{demo_server.url}/v1/chat/completions", json=body | {"messages": body["messages"][:2]}
    )
    assert again.status_code == 200
    chat.say("/clear")
    assert "0 messages" in chat.say("/stats")
    assert "no command /nonsense" in chat.say("/nonsense")
    assert "cannot be read" in chat.say("/schema /nowhere")
    assert chat.end() == 0
    assert "/nonsense" in (tmp_path / "radixrt" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    with FakeServer(gap_s=0.05) as server:  # an answer of minutes
        chat = Chat(tmp_path, "chat", "--base-url", server.base_url, "--max-tokens", "10000")
        chat.until(">>> ")
        chat.say("Sing.", until="la la ")
        chat.interrupt()
        assert "(stopped)" in chat.until(">>> ")
        deadline = time.monotonic() + 20
        while server.running:
            assert time.monotonic() < deadline, "the server still writes the answer"
            time.sleep(0.05)
        chat.interrupt()
        assert "Ctrl-D" in chat.until(">>> ")
        assert "2 messages" in chat.say("/stats")
        assert chat.end() == 0


def test_the_progress_of_a_long_prompt_is_shown_until_its_answer_begins() -> None:
    """Only of a server that says it is radixrt: others may refuse a field that they don't know."""
    events: list[dict] = [
        {"choices": [], "prompt_progress": {"total": 7569, "cache": 0, "processed": done, "time_ms": done}}
        for done in (0, 3200, 7569)
    ]  # fmt: skip
    events.append({"choices": [{"delta": {"content": "Noval."}, "finish_reason": "stop"}]})
    bodies: list[dict] = []

    def respond(owner: str, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "demo", "owned_by": owner}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in events))

    for owner in ("openai", "radixrt"):
        client = ChatClient("http://127.0.0.1:1")
        client._http = httpx.Client(transport=httpx.MockTransport(partial(respond, owner)))
        client.models()
        terminal = Terminal(Conversation(client, "demo", {}))
        terminal._notes = Console(file=io.StringIO(), force_terminal=True)
        terminal.answer_once("Who?")
    assert [body.get("return_progress") for body in bodies] == [None, True]
    shown = terminal._notes.file.getvalue().split("\r")  # type: ignore[attr-defined]
    lines = [f"Reading the prompt: {done} of 7,569 tokens" for done in ("3,200", "7,569")]
    assert shown[1:6] == ["", lines[0], " " * len(lines[0]), lines[1], " " * len(lines[1])]


def test_one_answer_through_a_pipe_is_only_the_answer(demo_server: Server) -> None:
    done = command(
        "chat",
        "--base-url",
        demo_server.url,
        "--temperature",
        "0",
        "-p",
        FACT,
        stdin="What is the owner of Vidur?\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{FACT}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["chat", "--base-url", "http://127.0.0.1:9", "-p", "x"],
            "No server answers at http://127.0.0.1:9",
        ),
        (["chat", "--base-url", "{url}", "--model", "other", "-p", "x"], "404"),
        (["run", "other/model", "--port", "{port}", "-p", "x"], "serves demo, not other/model"),
        (
            ["run", "--model-path", "other/model", "--port", "{port}", "-p", "x"],
            "serves demo, not other/model",
        ),
        (["chat", "--base-url", "{url}"], "There is no question"),
    ],
)
def test_a_refusal_is_one_sentence(demo_server: Server, arguments: list[str], message: str) -> None:
    port = demo_server.url.rpartition(":")[2]
    done = command(*(argument.format(url=demo_server.url, port=port) for argument in arguments))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_run_uses_the_server_on_the_port(demo_server: Server) -> None:
    port = demo_server.url.rpartition(":")[2]
    done = command("run", "--port", port, "--temperature", "0", stdin=QUESTION)
    assert (done.returncode, done.stdout) == (0, f"{FACT}\n")


def test_run_starts_a_server_that_ends_with_the_chat(tmp_path: Path) -> None:
    port = free_port()
    chat = Chat(
        tmp_path, "run", "--port", str(port), "--temperature", "0", "--max-total-tokens", "4096"
    )
    chat.until(">>> ", timeout_s=120)
    assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    processes = psutil.Process(chat.process.pid).children(recursive=True)
    assert FACT in chat.say(QUESTION)
    assert chat.terminate() == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_a_sigterm_that_interrupts_no_wait_ends_the_chat_all_the_same() -> None:
    """As one does that comes just before readline waits for keys: here another thread gets it."""
    code = """
import signal, sys, threading
from radixrt.cli.chat.command import end_at_sigterm
end_at_sigterm()
threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM]).start()
sys.stdin.read()
"""
    with children.running([sys.executable, "-c", code], stdin=subprocess.PIPE) as chat:
        assert chat.wait(60) == 128 + signal.SIGTERM


def test_a_model_is_known_by_the_folder_that_it_is_served_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = {"id": "other-name", "root": str(resolve_model_path(DEMO_MODEL))}
    assert local_server._is_the_same(demo, DEMO_MODEL)
    file, made = tmp_path / "model.gguf", tmp_path / "cache" / "model"
    file.touch()
    assert not local_server._is_the_same(demo, str(made))
    monkeypatch.setattr(local_server, "resolve_model_path", {str(file): made}.__getitem__)
    assert local_server._is_the_same({"id": "other-name", "root": str(made)}, str(file))
    assert not local_server._is_the_same(demo, str(file))


def test_the_log_of_the_chats_server_shows_progress_and_errors_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = Console().status("")
    error = "12:00:01 worker    ERROR   No memory.\n"
    for line in (
        "12:00:00 worker    INFO    Loading weights: 1.0 of 2.0 GB.\n",
        "12:00:01 api       WARNING Ignored unknown request fields.\n",
        error,
    ):
        local_server._show(status, "big", line)
    assert status.status == "Loading big: 1.0 of 2.0 GB."
    assert capsys.readouterr().err == error
