"""The commands ``radixrt run`` (with a server on this machine) and ``radixrt chat`` (with a server
anywhere)."""

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from typing import Any

from rich.console import Console

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.supervision import start_thread
from radixrt.base.server_url import URL_VARIABLE
from radixrt.base.settings.adapters import named_adapters
from radixrt.cli.chat.client import ChatClient, ChatError, Conversation
from radixrt.cli.chat.local_server import OtherModelError, client_of, model_served_at, started
from radixrt.cli.chat.offer import choose_model, nothing_named
from radixrt.cli.chat.terminal import Terminal


def run_local(arguments: argparse.Namespace, config: ServerConfig) -> int:
    """Chat with the server on the port, or at ``--url``; if there is none, start one for the time
    of the chat. With ``--lora``, its first adapter answers. Returns the exit status."""
    given = os.environ.get(URL_VARIABLE) if arguments.model is None else None
    arguments.url = arguments.url or given
    try:
        adapter = next(iter(named_adapters(config.lora).items()), None)
        if arguments.url is not None:
            if adapter is not None:
                raise ChatError(
                    f"The server at {arguments.url} is running: --lora is for one that is started here. Name an adapter of it as "
                    "the model."
                )
            return run_remote(arguments)
        with contextlib.ExitStack() as stack:
            client = client_of(config)
            try:
                model = model_served_at(client, arguments.model, adapter)
            except OtherModelError as error:
                if arguments.model is None or config.port != ServerConfig().port:
                    raise
                print(
                    f"radixrt: {error.where} {arguments.model} is started on a free port.",
                    file=sys.stderr,
                )
                config, model = dataclasses.replace(config, port=0), None
            if model is None:
                if arguments.model is None:
                    chosen = _chosen(client.url)
                    config = dataclasses.replace(config, model_path=chosen)
                end_at_sigterm()  # so that the server ends with the chat
                config = stack.enter_context(started(config))
                client = client_of(config)
                client.asks_for_progress = True
                model = config.model_name if adapter is None else adapter[0]
            return _chat(client, model, arguments)
    except (ChatError, ConfigError, EngineDiedError) as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1


def _chosen(url: str) -> str:
    """A model that the user chooses; raises ChatError if there is no terminal to choose at."""
    console = Console(stderr=True, highlight=False)
    if sys.stdin is None or not sys.stdin.isatty() or not console.is_terminal:
        raise nothing_named(url)
    return choose_model(console)


def run_remote(arguments: argparse.Namespace) -> int:
    """Chat with the server at ``--url``; returns the exit status."""
    client = ChatClient(
        arguments.url, getattr(arguments, "api_key", None) or os.environ.get("RADIXRT_API_KEY")
    )
    try:
        models = client.models()
        model = arguments.model or next((str(entry["id"]) for entry in models), None)
        if model is None:
            raise ChatError(f"The server at {client.url} lists no model: name one with --model.")
        return _chat(client, model, arguments)
    except ChatError as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1


REPEAT_S = 0.05
"""Time between two signals, until the main thread has seen one."""


def end_at_sigterm() -> None:
    """Let SIGTERM end the program by a SystemExit in the main thread, which calls this.

    Python runs handlers between two operations of the main thread. A signal that comes just before
    readline waits for keys does not interrupt this wait, and readline has no limit of its time. So
    a thread repeats the signal until the handler has run.
    """
    arrived, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.signal(signal.SIGTERM, _end)
    signal.set_wakeup_fd(sent)
    start_thread(_repeat_sigterm, arrived, name="repeat-sigterm")


def _end(signum: int, frame: object) -> None:
    """Once: another signal must not leave half of the processes behind."""
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


def _repeat_sigterm(arrived: int) -> None:
    """Args:
    arrived: pipe with a byte for each signal, its number.
    """
    while os.read(arrived, 1) != bytes([signal.SIGTERM]):
        pass
    main = threading.main_thread().ident
    assert main is not None
    while signal.getsignal(signal.SIGTERM) is _end:
        time.sleep(REPEAT_S)
        signal.pthread_kill(main, signal.SIGTERM)


def _chat(client: ChatClient, model: str, arguments: argparse.Namespace) -> int:
    fields = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    conversation = Conversation(client, model, options, completes=not client.has_chat_template())
    conversation.system = arguments.system
    if arguments.schema is not None:
        conversation.set_schema(arguments.schema)
    terminal = Terminal(conversation)
    question = _question(arguments.prompt)
    return terminal.run() if question is None else terminal.answer_once(question)


def _question(prompt: str | None) -> str | None:
    """The text of ``-p`` and of a pipe; None: the questions come from a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = sys.stdin.read().strip()
    parts = [part for part in (prompt, piped) if part]
    if not parts:
        raise ChatError("There is no question: give one with -p TEXT, or through the pipe.")
    return "\n\n".join(parts)
