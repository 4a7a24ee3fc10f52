"""Finds the server on a local port, or starts one for the time of a chat."""

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.local_url import local_url
from radixrt.chat.client import ChatClient, ChatError, NoServerError
from radixrt.supervisor.launch import bind, prepare
from radixrt.supervisor.supervisor import Supervisor

_POLL_S = 0.1


def url_of(config: ServerConfig) -> str:
    """The address at which a client on this machine reaches a server of these settings."""
    return local_url(config.host, config.port, is_https=config.tls_cert is not None)


def key_of(config: ServerConfig) -> str | None:
    """The API key with which a client on this machine asks."""
    return config.api_key or os.environ.get("RADIXRT_API_KEY")


def model_served_at(client: ChatClient, wanted: str | None) -> str | None:
    """Name of the model that a server serves.

    Args:
        wanted: model path, hub id or name; None: whichever the server serves.

    Returns:
        None: no server answers.

    Raises:
        ChatError: the server serves another model.
    """
    try:
        models = client.models()
    except NoServerError:
        return None
    if not models:
        raise ChatError(f"The server at {client.url} serves no model.")
    for model in models:
        if wanted is None or _is_the_same(model, wanted):
            return str(model["id"])
    raise ChatError(
        f"The server at {client.url} serves {models[0]['id']}, not {wanted}. Leave the model out to chat with that one, or "
        "choose another port with --port."
    )


def _is_the_same(model: dict[str, Any], wanted: str) -> bool:
    root = str(model.get("root") or "")
    name = wanted.rstrip("/")
    if name in (model["id"], root):
        return True
    if name.startswith("hf:"):  # by default served under its last part
        return name.split("/")[-1] == model["id"]
    folder = Path(wanted).expanduser()
    # a hub id is downloaded into a folder models--USER--NAME
    return (folder.is_dir() and folder.resolve() == Path(root).resolve()) or (
        f"models--{name.replace('/', '--')}" in Path(root).parts
    )


@contextlib.contextmanager
def started(config: ServerConfig) -> Iterator[ServerConfig]:
    """Run a server of these settings until the block ends; yields the settings with the port that it listens on.

    Raises:
        ConfigError: a setting, the checkpoint or the machine makes it impossible.
        EngineDiedError: a process ended.
    """
    config = prepare(dataclasses.replace(config, log_level="error"))
    with bind(config.host, config.port) as listener:
        config = dataclasses.replace(config, port=listener.getsockname()[1])
        with Supervisor(config, listener, api_stdout=subprocess.DEVNULL) as supervisor:
            failure: list[Exception] = []
            threading.Thread(target=_watch, args=(supervisor, failure), daemon=True).start()
            with Console(stderr=True).status(f"Loading {config.model_name} …"):
                _wait_until_it_answers(ChatClient(url_of(config), key_of(config)), failure)
            yield config


def _watch(supervisor: Supervisor, failure: list[Exception]) -> None:
    try:
        supervisor.wait()
    except (ConfigError, EngineDiedError) as error:
        failure.append(error)


def _wait_until_it_answers(client: ChatClient, failure: list[Exception]) -> None:
    while not failure:
        with contextlib.suppress(NoServerError):
            client.models()
            client.close()
            return
        time.sleep(_POLL_S)
    raise failure[0]
