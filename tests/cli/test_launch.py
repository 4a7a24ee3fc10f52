"""``radixrt launch``, with a program in place of each agent that reads its settings as the agent
does. ``make test-clients`` has the real ones."""

import dataclasses
import doctest
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench import children
from bench.local_server import free_port
from radixrt.cli.launch import command
from radixrt.cli.launch.agents import AGENTS, Setup
from radixrt.cli.main import main
from tests.bench.fake_openai_server import FakeServer
from tests.cli import fake_agent
from tests.clients import agents
from tests.servers import Server


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PATH with all agents, whose prompts fit any context."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, agent in AGENTS.items():
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{Path(fake_agent.__file__).read_text()}")
        program.chmod(0o755)
        monkeypatch.setitem(AGENTS, name, dataclasses.replace(agent, first_prompt=0))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def launched(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_works_with_the_server_and_its_second_turn_comes_from_the_cache(
    name: str,
    demo_server: Server,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    httpx.post(f"{demo_server.url}/flush_cache").raise_for_status()
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another service")
    monkeypatch.setenv("FAKE_STATUS", "7")
    assert launched(name, "--url", demo_server.url, "--", "-p", "--url", "it") == 7
    output, report = capfd.readouterr()
    seen = json.loads(output)
    assert seen["own"] == ["-p", "--url", "it"] and seen["model"] == "demo"
    assert "Noval" in seen["answers"][0]["content"] and "Teska" in seen["answers"][1]["content"]
    counted = re.search(r"(\S+ ?\S*): 2 turns, (\d+) prompt tokens: (\d+) from the cache \(\S+ %\), (\d+) computed", report)  # fmt: skip
    assert counted, report
    prompt, cached, computed = map(int, counted.groups()[1:])
    assert counted[1] == AGENTS[name].title
    assert 0 < cached < prompt == cached + computed
    assert 2 * cached > 0.9 * (prompt - 40), "what the first turn has sent is cached in the second"
    assert "new text" in report


def test_requests_of_others_do_not_count(
    demo_server: Server, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert launched("codex", "--url", demo_server.url) == 0
        assert "Codex: 2 turns, " in capfd.readouterr().err


def test_a_server_that_explains_nothing_leaves_the_agents_status_alone(
    installed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "codex").write_text("#!/bin/sh\nexit 3")
    with FakeServer() as server:
        assert launched("codex", "--url", server.base_url) == 3
    assert "Codex: no report of the cache. The server answered 404" in capfd.readouterr().err


def test_the_share_of_repeated_tokens_is_that_of_the_conversation() -> None:
    result = doctest.testmod(agents)
    assert result.attempted and not result.failed


def test_an_agent_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launched("opencode") == 1
    assert "Install it with: npm install -g opencode-ai" in capfd.readouterr().err


def test_a_context_that_is_too_short_is_refused_before_the_agent_starts(
    demo_server: Server,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    agent = dataclasses.replace(AGENTS["claude"], first_prompt=20_000)
    monkeypatch.setitem(AGENTS, "claude", agent)
    assert launched("claude", "--url", demo_server.url) == 1
    output, report = capfd.readouterr()
    assert output == "" and "the built-in model has 8,192" in report
    assert "--model-path DIR_OR_HUB_ID" in report


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["--port", "{port}", "--model-path", "other/model"], "serves demo, not other/model"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(
    arguments: list[str],
    sentence: str,
    demo_server: Server,
    installed: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = demo_server.url.rpartition(":")[2]
    assert launched("codex", *(one.format(port=port) for one in arguments)) == 1
    assert sentence in capfd.readouterr().err


def test_a_signal_while_the_agent_starts_is_the_agents(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents: list[subprocess.Popen[bytes]] = []

    class Starting(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            agents.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    def end(*_: object) -> None:
        raise AssertionError("the agent would be left alone")

    before = signal.signal(signal.SIGTERM, end)
    monkeypatch.setattr(subprocess, "Popen", Starting)
    try:
        status = command._run_agent(str(installed / "aider"), Setup(), ["--wait"])
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
        for agent in agents:
            agent.kill()
            agent.wait()
    assert status in (9, 128 + signal.SIGTERM) and len(agents) == 1


def test_a_server_is_started_and_sigterm_is_the_agents(installed: Path) -> None:
    port = str(free_port())
    line = [sys.executable, "-m", "radixrt.cli", "launch", "aider", "--port", port, "--max-total-tokens", "4096", "--", "--wait"]  # fmt: skip
    with children.running(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launch:  # fmt: skip
        assert launch.stdout is not None and launch.stderr is not None
        assert launch.stdout.readline() == "waiting\n"
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        processes = psutil.Process(launch.pid).children(recursive=True)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(30) == 9
        assert "aider: the server has answered none of its requests." in launch.stderr.read()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
