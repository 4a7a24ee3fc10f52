"""The command ``radixrt launch``: finds or starts a server, and runs a coding agent with it."""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.cli.chat.client import ChatClient, ChatError
from radixrt.cli.chat.command import end_at_sigterm
from radixrt.cli.chat.local_server import client_of, model_served_at, started
from radixrt.cli.launch.agents import AGENTS, Agent, Setup, Target
from radixrt.cli.launch.report import SessionWatch

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
    """Raises:
    ConfigError: the agent is not installed.
    """
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
    """Raises:
    ConfigError: the agent's prompts are longer than the model's context.
    """
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
    agent = subprocess.Popen([program, *setup.arguments, *arguments], env=environment)
    before = {signum: signal.signal(signum, lambda got, _: agent.send_signal(got)) for signum in _FORWARDED}  # fmt: skip
    # The terminal sends Ctrl-C to the agent as well, which decides what it means.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN if sys.stdin.isatty() else lambda got, _: agent.send_signal(got))  # fmt: skip
    try:
        status = agent.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return status if status >= 0 else 128 - status
