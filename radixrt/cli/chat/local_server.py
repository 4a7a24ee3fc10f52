"""Finds the server on a local port, or starts one for the time of a chat."""

import contextlib
import dataclasses
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.liveness.supervision import start_thread
from radixrt.base.server_url import local_url, server_context
from radixrt.cli.chat.client import ChatClient, ChatError, NoServerError, NotAServerError
from radixrt.models.checkpoint import resolve_model_path
from radixrt.supervisor.launch import bind, prepare
from radixrt.supervisor.supervisor import Supervisor

_POLL_S = 0.1

_QUIET = re.compile(r"\S+ +\S+ +(?:DEBUG|INFO|WARNING) +(?P<text>.*)")
"""Lines of the server's log that would disturb a chat."""
_PROGRESS = re.compile(r"Loading weights: (?P<done>.*)")


class OtherModelError(ChatError):
    """The server serves another model, or is no server of models.

    Attributes:
        where: one sentence about the server.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} Leave the model out to chat with that one, or choose another port with --port."
        )
        self.where = where


def client_of(config: ServerConfig) -> ChatClient:
    """A client on this machine of a server of these settings. Of a TLS server it wants the
    certificate itself, for any name.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    url = local_url(config.host, config.port, is_https=config.tls_cert is not None)
    tls = None
    if config.tls_cert is not None:
        server_context(config.tls_cert, config.tls_key)
        tls = ssl.create_default_context(cafile=config.tls_cert)
        tls.check_hostname = False
        tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return ChatClient(url, config.api_key or os.environ.get("RADIXRT_API_KEY"), tls)


def model_served_at(
    client: ChatClient, wanted: str | None, adapter: tuple[str, str] | None = None
) -> str | None:
    """Name of the model that a server serves, or of its adapter.

    Args:
        wanted: model path, hub id or name; None: whichever the server serves.
        adapter: name and path of a LoRA adapter of the model; None: the model itself.

    Returns:
        None: no server answers.

    Raises:
        OtherModelError: the server serves another model, or has no such adapter.
        ChatError: it is loading its model, or is no server of models.
        ConfigError: ``wanted`` is a file that cannot be served.
    """
    try:
        models = client.models()
    except NoServerError:
        return None
    except NotAServerError as error:
        raise OtherModelError(str(error)) from error
    if not models:
        raise ChatError(f"The server at {client.url} serves no model.")
    for model in models:
        if wanted is None or _is_the_same(model, wanted):
            if adapter is None:
                return str(model["id"])
            name, path = adapter
            if any(
                one["id"] == name
                and one.get("parent") == model["id"]
                and Path(str(one.get("root"))).resolve() == Path(path).resolve()
                for one in models
            ):
                return name
            raise OtherModelError(
                f"The server at {client.url} serves {model['id']} without the adapter {path}."
            )
    raise OtherModelError(f"The server at {client.url} serves {models[0]['id']}, not {wanted}.")


def _is_the_same(model: dict[str, Any], wanted: str) -> bool:
    root = str(model.get("root") or "")
    name = wanted.rstrip("/")
    if name in (model["id"], root):
        return True
    if name.startswith("hf:"):  # by default served under its last part
        return name.split("/")[-1] == model["id"]
    if wanted == DEMO_MODEL or Path(wanted).expanduser().exists():
        return resolve_model_path(wanted).resolve() == Path(root).resolve()
    # a hub id is downloaded into a folder models--USER--NAME
    return f"models--{name.replace('/', '--')}" in Path(root).parts


@contextlib.contextmanager
def started(config: ServerConfig) -> Iterator[ServerConfig]:
    """Run a server of these settings until the block ends; yields the settings with the port that
    it listens on.

    Raises:
        ConfigError: a setting, the checkpoint or the machine makes it impossible.
        EngineDiedError: a process ended.
    """
    config = prepare(dataclasses.replace(config, log_level="info"))
    with bind(config.host, config.port) as listener:
        config = dataclasses.replace(config, port=listener.getsockname()[1])
        status = Console(stderr=True).status(f"Loading {config.model_name} …")
        show = partial(_show, status, config.model_name)
        with Supervisor(
            config, listener, api_stdout=subprocess.DEVNULL, show_log=show
        ) as supervisor:
            failure: list[Exception] = []
            start_thread(_watch, supervisor, failure, name="watch")
            with status:
                _wait_until_ready(client_of(config), failure)
            yield config


def _show(status: Status, model_name: str, line: str) -> None:
    """Show a line of the server's log: its progress beside the spinner, errors as they are."""
    if (quiet := _QUIET.match(line)) is None:
        sys.stderr.write(line)
    elif progress := _PROGRESS.match(quiet["text"]):
        status.update(f"Loading {model_name}: {progress['done']}")


def _watch(supervisor: Supervisor, failure: list[Exception]) -> None:
    try:
        supervisor.wait()
    except (ConfigError, EngineDiedError) as error:
        failure.append(error)


def _wait_until_ready(client: ChatClient, failure: list[Exception]) -> None:
    with contextlib.closing(client):
        while not client.is_ready():
            if failure:
                raise failure[0]
            time.sleep(_POLL_S)
