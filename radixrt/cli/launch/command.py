"""The command ``radixrt launch``: finds or starts a server, runs a coding agent with it, and reports
the cache's part in the agent's requests."""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.supervision import start_thread
from radixrt.cli.chat.client import ChatClient, ChatError
from radixrt.cli.chat.command import end_at_sigterm
from radixrt.cli.chat.local_server import client_of, model_served_at, started
from radixrt.cli.launch.agents import AGENTS, Agent, Setup, Target

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def run(arguments: argparse.Namespace, config: ServerConfig) -> int:
    """Run an agent until it ends; returns its exit status."""
    agent = AGENTS[arguments.agent]
    try:
        program = _program(agent)
        with contextlib.ExitStack() as stack:
            client, model, is_ours = _server(stack, arguments, config)
            context = _context(model)
            _check_context(agent, str(model["id"]), context)
            target = Target(
                url=client.url,
                model=str(model["id"]),
                key=config.api_key or os.environ.get("RADIXRT_API_KEY") or "none",
                context=context,
                session=f"launch-{secrets.token_hex(6)}",
                folder=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="radixrt-"))),
            )
            watch = stack.enter_context(SessionWatch(client, target.session))
            status = _run_agent(program, agent.setup(target), arguments.of_agent)
            print(watch.summary(agent.title, names_turns=not is_ours), file=sys.stderr)
            return status
    except (ChatError, ConfigError, EngineDiedError) as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1


def _program(agent: Agent) -> str:
    """Raises ConfigError if the agent is not installed."""
    if (program := shutil.which(agent.program)) is None:
        raise ConfigError(
            f"{agent.title} is not installed: there is no program {agent.program!r} in PATH. Install it with: {agent.install}"
        )
    return program


def _server(
    stack: contextlib.ExitStack, arguments: argparse.Namespace, config: ServerConfig
) -> tuple[ChatClient, dict[str, Any], bool]:
    """A server, its model's entry in ``/v1/models``, and whether it ends with the agent: the one of
    ``--url``, or the one on the port, or one that is started.

    Raises:
        ChatError: the server does not answer, or serves another model.
        ConfigError: no server can be started.
        EngineDiedError: the server that was started has ended.
    """
    if arguments.url is not None:
        client = ChatClient(arguments.url, config.api_key or os.environ.get("RADIXRT_API_KEY"))
    else:
        client = client_of(config)
        name = model_served_at(client, _wanted(arguments, config))
        if is_ours := name is None:
            end_at_sigterm()  # so that the server ends with the agent
            config = stack.enter_context(started(config))
            client, name = client_of(config), config.model_name
        return client, next(one for one in client.models() if one["id"] == name), is_ours
    if not (models := client.models()):
        raise ChatError(f"The server at {client.url} serves no model.")
    return client, models[0], False


def _wanted(arguments: argparse.Namespace, config: ServerConfig) -> str | None:
    is_given = "model_path" in vars(arguments) or config.model_path != ServerConfig().model_path
    return config.model_path if is_given else None


def _context(model: dict[str, Any]) -> int | None:
    context = model.get("max_model_len")
    return context if isinstance(context, int) else None


def _check_context(agent: Agent, model: str, context: int | None) -> None:
    """Raises ConfigError if the agent's prompts are longer than the model's context."""
    if context is not None and context <= agent.first_prompt:
        which = "the built-in model" if model == DEMO_MODEL else model
        raise ConfigError(
            f"{agent.title} begins with a prompt of about {agent.first_prompt:,} tokens, and the context of {which} has "
            f"{context:,}. Choose a model with a longer one: radixrt launch {agent.program} --model-path DIR_OR_HUB_ID"
        )


def _run_agent(program: str, setup: Setup, arguments: list[str]) -> int:
    """Run an agent in this terminal; returns its exit status, or 128 and the number of the signal
    that has ended it."""
    environment = setup.defaults | os.environ | setup.environment
    environment = {name: value for name, value in environment.items() if value}
    agents: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(signum: int, _: object) -> None:
        if agents:
            agents[0].send_signal(signum)
        else:
            early.append(signum)

    before = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    # A terminal sends Ctrl-C to the agent as well, which decides what it means; it would inherit SIG_IGN.
    on_interrupt = (lambda *_: None) if sys.stdin.isatty() else forward
    before[signal.SIGINT] = signal.signal(signal.SIGINT, on_interrupt)
    try:
        agent = subprocess.Popen([program, *setup.arguments, *arguments], env=environment)
        agents.append(agent)
        for signum in early:
            agent.send_signal(signum)
        status = agent.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return status if status >= 0 else 128 - status


POLL_S = 20.0
"""The server remembers the prompts of some hundred requests of an agent, which no model answers in
this time."""

_MEANING = {
    "none": "the last token of a prompt, which is always computed",
    "never_seen": "new text",
    "page_rounding": "tokens of incomplete pages",
    "evicted": "evicted",
    "missing_state": "tokens whose state was not kept",
    "other_salt": "cached under another salt",
    "other_adapter": "cached by another adapter",
    "template_rewrote_history": "earlier messages that the chat template wrote in another way",
    "tools_changed": "changed tools",
    "volatile_text": "a time, a number or an id in the prompt that differs",
}
_USUAL = frozenset({"none", "never_seen", "page_rounding", "missing_state"})
"""Causes that nobody can avoid."""


class SessionWatch:
    """Collects the explanations of a session's requests while the block runs."""

    def __init__(self, client: ChatClient, session: str) -> None:
        self._client = client
        self._path = f"/v1/cache/explain?session={quote(session)}"
        self._requests: dict[str, dict[str, Any]] = {}
        self._error: ChatError | None = None
        """The error of the last reading."""
        self._ended = threading.Event()

    def __enter__(self) -> "SessionWatch":
        start_thread(self._poll, name="watch-session")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            self._read()

    def _read(self) -> None:
        try:
            explained = self._client.get(self._path)["requests"]
        except ChatError as error:  # the next reading has the same requests
            self._error = error
            return
        self._error = None
        self._requests |= {request["request_id"]: request for request in explained}

    def summary(self, title: str, names_turns: bool) -> str:
        """The report, from all requests until now.

        Args:
            names_turns: with the address of the explanations of all turns.
        """
        self._read()
        if self._error is not None:
            return f"{title}: no report of the cache. {self._error}"
        report = summary(title, list(self._requests.values()))
        if names_turns and self._requests:
            report += f"\n  each turn: {self._client.url}{self._path}"
        return report


def summary(title: str, requests: list[dict[str, Any]]) -> str:
    """
    >>> turn = {"prompt_tokens": 90, "cached_tokens": 0, "missed_tokens": 90, "cause": "never_seen", "detail": "…"}
    >>> print(summary("Codex", [turn, turn | {"prompt_tokens": 110, "cached_tokens": 100, "missed_tokens": 10}]))
    Codex: 2 turns, 200 prompt tokens: 100 from the cache (50.0 %), 100 computed.
      computed      100  in 2 turns: new text
    """
    if not requests:
        return f"{title}: the server has answered none of its requests."
    prompt, cached = (sum(one[name] for one in requests) for name in ("prompt_tokens", "cached_tokens"))  # fmt: skip
    turns = "1 turn" if len(requests) == 1 else f"{len(requests)} turns"
    lines = [
        f"{title}: {turns}, {prompt:,} prompt tokens: {cached:,} from the cache "
        f"({100 * cached / max(1, prompt):.1f} %), {prompt - cached:,} computed."
    ]
    causes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in requests:
        causes[one["cause"]].append(one)
    for cause, missed in sorted(causes.items(), key=lambda item: -_tokens(item[1])):
        where = f"in {len(missed)} turn{'s' * (len(missed) != 1)}"
        line = f"  computed {_tokens(missed):>8,}  {where}: {_MEANING.get(cause, cause)}"
        if cause not in _USUAL:
            largest = max(missed, key=lambda one: int(one["missed_tokens"]))
            line += f". {largest['detail']}"
        lines.append(line)
    return "\n".join(lines)


def _tokens(requests: list[dict[str, Any]]) -> int:
    return sum(int(one["missed_tokens"]) for one in requests)
