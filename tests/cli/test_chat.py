"""``radixrt run`` and ``radixrt chat``, in a pseudo-terminal and through pipes."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from bench import children
from bench.local_server import free_port
from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.cli.chat import command as chat_command
from radixrt.cli.chat import local_server, offer
from radixrt.cli.chat.client import MAX_CONTINUATION, ChatClient, ChatError, Conversation
from radixrt.cli.chat.terminal import Terminal
from radixrt.cli.config_flags import config_from_arguments
from radixrt.cli.main import _parsed
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.local import LocalModel
from tests.bench.fake_openai_server import FakeServer
from tests.command_line import run_here
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
    assert "cannot be read" in chat.say("/image /nowhere")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    assert "next question" in chat.say(f"/image {tmp_path}/a.png")
    assert "has no vision tower" in chat.say("What is this?")
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
    done = run_here(*(argument.format(url=demo_server.url, port=port) for argument in arguments))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_run_uses_the_server_on_the_port(demo_server: Server) -> None:
    port = demo_server.url.rpartition(":")[2]
    done = run_here("run", "--port", port, "--temperature", "0", stdin=QUESTION)
    assert (done.returncode, done.stdout) == (0, f"{FACT}\n")


def test_run_starts_a_server_that_ends_with_the_chat(tmp_path: Path) -> None:
    port = free_port()
    chat = Chat(
        tmp_path,
        "run",
        "demo",
        "--port",
        str(port),
        "--temperature",
        "0",
        "--max-total-tokens",
        "4096",
    )
    chat.until(">>> ", timeout_s=120)
    assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    processes = psutil.Process(chat.process.pid).children(recursive=True)
    assert FACT in chat.say(QUESTION)
    assert chat.terminate() == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_run_with_a_model_starts_on_a_free_port_beside_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the port of no flag, here served by a program that is no server of models."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{httpd.server_address[1]}"
    client = ChatClient(url)
    with pytest.raises(local_server.OtherModelError, match="no OpenAI-compatible API"):
        local_server.model_served_at(client, DEMO_MODEL)
    started: list[int] = []

    @contextlib.contextmanager
    def start(config: ServerConfig) -> Iterator[ServerConfig]:
        started.append(config.port)
        raise ChatError("It would start.")
        yield config

    monkeypatch.setattr(chat_command, "client_of", lambda config: client)
    monkeypatch.setattr(chat_command, "started", start)
    monkeypatch.setattr(chat_command, "end_at_sigterm", lambda: None)
    for flags in ([], ["--port", "1234"]):
        arguments = _parsed(["run", DEMO_MODEL, "-p", "x", *flags])
        assert chat_command.run_local(arguments, config_from_arguments(arguments)) == 1
    assert started == [0]
    httpd.shutdown()
    httpd.server_close()


def test_run_without_a_model_offers_those_that_are_here_and_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are whole, the first one that is on this machine is the default, and the
    demonstration is last."""
    mine = LocalModel(name="hf:maker/mine:Q8_0", bytes=10**9, reason=None)
    bad = LocalModel(name="maker/strange", bytes=1, reason="no reason")
    for local, room, answers, expected in (
        ([bad, mine], 8e9, [""], mine.name),
        ([], 8e9, [""], "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        ([], 1.5e9, ["1"], "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ([], 0, [""], DEMO_MODEL),
        ([mine], 0, ["0", "7", "2"], DEMO_MODEL),
        ([mine], 0, [" USER/NAME "], "USER/NAME"),
    ):
        said = io.StringIO()
        typed = iter(answers)
        monkeypatch.setattr(offer, "local_models", lambda folders, found=local: iter(found))
        monkeypatch.setattr(offer, "room_for_weights", lambda most=room: most)
        monkeypatch.setattr("builtins.input", partial(next, typed))
        console = Console(file=said, width=80, force_terminal=False)
        assert offer.choose_model(console) == expected
        names = [one.name for one in (*local, *offer.fitting(int(room))) if one is not bad]
        text = said.getvalue()
        assert all(name in text for name in names) and "strange" not in text
        assert text.index(DEMO_MODEL) > max((text.index(name) for name in names), default=0)
    sizes = [one.gigabytes for one in offer.RECOMMENDED]
    assert sizes == sorted(sizes)


def test_a_model_without_a_chat_template_continues_texts(
    demo_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so. The server is one of a chat; the client takes it for the other kind."""
    client = ChatClient(demo_server.url)
    assert client.has_chat_template()
    conversation = Conversation(client, "demo", {"temperature": 0}, completes=True)
    expected = httpx.post(
        f"{demo_server.url}/v1/completions",
        json={"model": "demo", "prompt": "One", "temperature": 0, "max_tokens": MAX_CONTINUATION},
    ).json()["choices"][0]["text"]
    assert "".join(piece.text for piece in conversation.ask("One")) == expected
    assert conversation.body()["prompt"] == expected  # what was said last, for /save
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said = io.StringIO()
    terminal = Terminal(conversation)
    terminal._notes = Console(file=said, width=200)
    assert terminal.run() == 0
    assert "no chat template" in said.getvalue() and "--chat-template FILE" in said.getvalue()


def test_every_command_with_a_server_takes_its_address_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXRT_URL", "http://there:1")
    for command in (["top"], ["chat"], ["bench", "serve"]):
        assert _parsed(command).url == "http://there:1"
        for flag in ("--url", "--base-url"):
            assert _parsed([*command, flag, "http://here:2/v1"]).url == "http://here:2/v1"
    assert _parsed(["run", "--url", "http://here:2"]).url == "http://here:2"


def test_run_chats_with_the_server_at_the_address(demo_server: Server) -> None:
    done = run_here("run", "--url", f"{demo_server.url}/v1", "--temperature", "0", stdin=QUESTION)
    assert (done.returncode, done.stdout) == (0, f"{FACT}\n")


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
