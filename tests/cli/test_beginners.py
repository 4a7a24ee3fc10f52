"""Twelve errors of a first hour, each with the sentence that a beginner gets: what is wrong, and
what to type instead."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from radixrt.base.config import DEMO_MODEL
from radixrt.cli.main import main
from radixrt.models.checkpoint import resolve_model_path
from tests.command_line import run_here
from tests.servers import Server, serving
from tests.servers.fake_hub import FakeHub

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """Runs a command that fails, and gives what it says: no traceback, and less than a screen.

    With variables of the environment, in a process of its own: libraries read them when they are
    imported.
    """
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def said(*arguments: str, **env: str) -> str:
        if env:
            run = [sys.executable, "-m", "radixrt.cli", *arguments]
            whole = {**os.environ, **env}
            done = subprocess.run(run, env=whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)  # fmt: skip
            status, text = done.returncode, done.stderr
        else:
            with pytest.raises(SystemExit) as exit, open(os.devnull) as nothing:
                monkeypatch.setattr(sys, "stdin", nothing)
                main(arguments)
            status, text = exit.value.code, capfd.readouterr().err
        lines = [line for line in text.splitlines() if line.startswith("radixrt: ")]
        assert status in (1, 2) and "Traceback (most" not in text and len(lines) == 1, text
        return lines[0]

    yield said
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def test_1_a_name_of_ollamas_library(says: Callable[..., str]) -> None:
    said = says("run", "llama3.2")
    assert "look like USER/NAME, or hf:USER/REPO:Q4_K_M" in said and "radixrt models" in said


def test_2_a_file_of_the_hub_as_llama_cpp_and_ollama_write_it(says: Callable[..., str]) -> None:
    for name in ("maker/X-GGUF:Q4_K_M", "hf.co/maker/X-GGUF:Q4_K_M"):
        assert "Did you mean hf:maker/X-GGUF:Q4_K_M?" in says("serve", name)


def test_3_a_misspelt_flag_and_one_that_does_not_exist_here(says: Callable[..., str]) -> None:
    assert "did you mean --context-length?" in says("serve", "--context-lenght", "512")
    assert "change lora_alpha" in says("serve", "demo", "--lora-scaled", "a:2")


def test_4_no_network(says: Callable[..., str], tmp_path: Path) -> None:
    """Or a proxy that is not set."""
    env = {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path)}
    said = says("serve", "maker/model", **env)
    assert f"the hub cannot be reached at {NOWHERE}: check the network" in said
    assert "Error" not in said
    assert "HF_HUB_OFFLINE" in says("serve", "maker/model", HF_HUB_OFFLINE="1", **env)


def test_5_a_name_that_the_hub_does_not_know_or_whose_terms_are_not_accepted(
    says: Callable[..., str], tmp_path: Path
) -> None:
    with FakeHub(closed={"config.json": b"{}"}, packed={"m-Q8_0.gguf": b""}) as hub:
        hub.gated.add("maker/closed")
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        assert "does not exist on the hub, or is private" in says("serve", "maker/none", **env)
        assert "accept its terms at" in says("serve", "maker/closed", **env)
        assert "its name is hf:maker/packed:Q4_K_M" in says("serve", "maker/packed", **env)


def test_6_a_port_that_is_taken(says: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose one with --port" in says("serve", "demo", "--port", port)


def test_7_no_server_and_nothing_named(says: Callable[..., str]) -> None:
    """A pipe cannot be asked, and nothing is chosen for it."""
    said = says("run", "-p", "Hello", "--port", "9")
    assert "`radixrt run demo` starts the built-in demonstration" in said
    assert "radixrt models" in said
    assert "No server answers" in says("top", "--once", "--url", NOWHERE)
    assert "No server answers" in says("chat", "-p", "Hello", RADIXRT_URL=NOWHERE)


def test_8_a_folder_that_is_no_checkpoint(says: Callable[..., str], tmp_path: Path) -> None:
    assert "no checkpoint: it holds no config.json" in says("serve", str(tmp_path))
    assert "There is no folder" in says("models", str(tmp_path / "none"))


def test_9_a_key_file_with_the_other_ending(says: Callable[..., str], tmp_path: Path) -> None:
    """``radixrt key new`` prints TOML, whatever the file is called."""
    file = tmp_path / "keys.json"
    file.write_text(run_here("key", "new", "me").stdout)
    assert "no such folder" in says("serve", "/nowhere", "--api-keys", str(file))
    file.write_text("{")
    assert "See docs/security.md" in says("serve", "demo", "--api-keys", str(file))


def ask(server: Server, path: str, body: object) -> tuple[int, str]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return response.status_code, response.json()["error"]["message"]


def test_10_embeddings_of_a_chat_model_and_a_model_that_is_not_there(demo_server: Server) -> None:
    status, message = ask(demo_server, "/v1/embeddings", {"input": "hi"})
    assert status == 400 and "Serve an embedding model" in message  # a 501 would be tried again
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    status, message = ask(demo_server, "/v1/chat/completions", body)
    assert status == 404 and "'demo'" in message


def test_11_a_prompt_that_is_too_long(demo_server: Server) -> None:
    status, message = ask(demo_server, "/v1/completions", {"prompt": "long " * 9000})
    assert status == 400 and "Shorten" in message and "prompt is too long" in message


@pytest.fixture(scope="module")
def no_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "plain"
    shutil.copytree(resolve_model_path(DEMO_MODEL), folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_12_a_model_without_a_chat_template(no_template: Path) -> None:
    """The banner's example works, and ``run`` and the API say what to do."""
    with serving(no_template, "--max-total-tokens", "4096") as server:
        text = "".join(server.log)
        assert "has no chat template" in text and "/v1/completions -H" in text
        assert text.startswith("Starting ") and f"page      {server.url}/" in text
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        status, message = ask(server, "/v1/chat/completions", chat)
        assert status == 400 and "/v1/completions" in message and "--chat-template" in message
        done = run_here("run", "--url", server.url, "-p", "The")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
