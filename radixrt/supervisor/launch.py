"""Checks the settings and the checkpoint, and runs a server until a signal ends it."""

import dataclasses
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from radixrt.base.api_keys import KeySource
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, EngineDiedError
from radixrt.base.server_url import server_context
from radixrt.models.checkpoint import (
    check_checkpoint,
    check_ranks,
    generation_config,
    resolve_model_path,
    served_context_length,
    unreadable,
)
from radixrt.models.memory_need import check_fits, engine_need, loads_weights
from radixrt.models.pooling import read_pooling
from radixrt.parsers.choice import with_parsers
from radixrt.supervisor.served_models import are_several, served_models
from radixrt.supervisor.supervisor import MAX_DEATHS, Supervisor

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 65535
"""The system's limit (net.core.somaxconn, often 4096) applies. A connection that finds the queue
full waits for seconds."""


def prepare(config: ServerConfig) -> ServerConfig:
    """Check the settings and the checkpoint before any process starts; a hub id or a GGUF file
    becomes a folder.

    Raises:
        ConfigError: says what to change.
    """
    config = config.validate()
    has_engine = config.dp > 0  # otherwise no weights are needed
    in_memory = loads_weights(config)
    model_dir = resolve_model_path(
        config.model_path,
        with_weights=has_engine,
        check_room=in_memory and config.quantization == "auto",
        mmproj=config.mmproj,
    )
    try:
        model_config = check_checkpoint(
            model_dir, config.load_format if has_engine else "dummy", config.quantization
        )
        if in_memory:
            check_fits(
                engine_need(dataclasses.replace(config, model_path=str(model_dir))), config.dp
            )
        pooling = read_pooling(model_dir, model_config)
        served_context_length(model_config, config.context_length)
        check_ranks(model_config, config.tp)
        if pooling is not None and config.tp > 1:
            raise ConfigError("--tp: a model that gives vectors or classes runs on one device.")
        generation_config(model_dir)
    except ConfigError:
        raise
    except Exception as error:
        raise unreadable(model_dir, error) from error
    tokenizer_path = config.tokenizer_path
    if tokenizer_path is not None:
        tokenizer_path = str(resolve_model_path(tokenizer_path, "--tokenizer-path"))
    draft_model = config.draft_model
    if draft_model is not None:
        draft_model = str(resolve_model_path(draft_model, "--draft-model"))
    return with_parsers(
        dataclasses.replace(
            config,
            draft_model=draft_model,
            model_path=str(model_dir),
            tokenizer_path=tokenizer_path,
            served_model_name=" ".join(config.model_names),
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. The api process answers with 503 until the engine is ready.

    A socket that is only bound would let a second server bind the same port, which fails when its
    model is loaded.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use by another program; choose one with --port."
            ) from None
        raise ConfigError(
            f"Cannot listen on {host}:{port} ({error.strerror}); check --host and --port."
        ) from None
    return listener


def serve(configs: Sequence[ServerConfig], total_tokens: int | None = None) -> int:
    """Run a server until a signal ends it; returns the exit status.

    Args:
        configs: of its models; the first has the settings of the server, too.
        total_tokens: see :func:`radixrt.supervisor.served_models.served_models`.

    SIGTERM drains: open requests are answered within ``--shutdown-grace`` seconds, new ones
    refused. SIGINT, or a second SIGTERM, ends at once. SIGHUP reads the key file again, if there is
    one; otherwise it ends the server.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt_once)
    config, models = configs[0], []
    try:
        keys = KeySource.from_config(config, os.environ)
        keys.load()  # here for its errors; the api process holds the keys
        if are_several(configs):
            models = served_models(configs, total_tokens, prepare)
            config = models[0].config
        else:
            config = prepare(config)
        if config.tls_cert is not None:
            server_context(config.tls_cert, config.tls_key)  # before a model is loaded in vain
        if keys.file is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # also in the processes that start now
        if config.join_token_file is not None:
            # asyncio and ZeroMQ, without which other servers start sooner
            from radixrt.joining.sockets import JoinKeys

            JoinKeys.read(config.join_token_file)  # for its errors
        if config.join is not None:
            return _serve_joined(config)
        with (
            bind(config.host, config.port) as listener,
            Supervisor(config, listener, MAX_DEATHS, models=models) as supervisor,
        ):
            if keys.file is not None:
                signal.signal(signal.SIGHUP, lambda signum, frame: supervisor.reload_keys())
            signal.signal(signal.SIGTERM, lambda signum, frame: _drain(supervisor))
            _wait(supervisor)
    except KeyboardInterrupt:
        return 0
    except (ConfigError, EngineDiedError) as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1
    return 0


def _serve_joined(config: ServerConfig) -> int:
    """Run an engine that joins an ingress. SIGTERM ends it at once: the ingress continues its
    answers in other engines."""
    from radixrt.supervisor.probes import answering_probes

    with (
        bind(config.host, config.port) as listener,
        Supervisor(config, None, MAX_DEATHS) as supervisor,
        answering_probes(listener, lambda: supervisor.status.is_well),
    ):
        _wait(supervisor)
    return 0


def _wait(supervisor: Supervisor) -> None:
    """Until the server ends. Signals that come later do not interrupt the end of its processes."""
    try:
        supervisor.wait()
    finally:
        _ignore_signals()


def _drain(supervisor: Supervisor) -> None:
    signal.signal(signal.SIGTERM, _interrupt_once)
    supervisor.drain()


def _interrupt_once(signum: int, frame: object) -> None:
    """Begin to stop; a second Ctrl-C must not leave half of the processes behind."""
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
