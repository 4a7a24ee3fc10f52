"""Starts and ends a child process of the engine: reads its config, sets up its log, ends it with
its parent."""

import argparse
import gc
import importlib
import logging
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.liveness.heartbeat import Heartbeat
from radixrt.base.liveness.link import CannotStart, Link, ServerStatus, SupervisorLink
from radixrt.base.liveness.supervision import start_thread

CONFIG_FILE = "config.json"
MODELS_FILE = "models.json"
EXIT_CONFIG_ERROR = 78
"""Exit status of a process that cannot start because of a setting (EX_CONFIG of sysexits.h)."""

NICE_STEP = 1.25
"""Ratio of the CPU time of two processes that compete, of which one is nicer by 1 (sched(7))."""


class ServedModel(msgspec.Struct, frozen=True):
    """One of several models of a server."""

    config: ServerConfig
    need_bytes: int
    """Memory that it takes at most while it is loaded; 0: that is not known."""


def write_models(run_dir: Path, models: Sequence[ServedModel]) -> None:
    """Write the models of a server that has several for its api process."""
    (run_dir / MODELS_FILE).write_bytes(msgspec.json.encode(models))


def read_models(run_dir: Path) -> list[ServedModel]:
    """The models of a server that has several; none: it has one."""
    file = run_dir / MODELS_FILE
    return msgspec.json.decode(file.read_bytes(), type=list[ServedModel]) if file.exists() else []


def read_config(run_dir: Path) -> ServerConfig:
    """The settings of a process that belongs to the folder."""
    return msgspec.json.decode((run_dir / CONFIG_FILE).read_bytes(), type=ServerConfig)


def write_config(run_dir: Path, config: ServerConfig) -> None:
    """Write the settings for the child processes; the directory is private to this user."""
    (run_dir / CONFIG_FILE).write_bytes(msgspec.json.encode(config))


def run_child(name: str, entry: str) -> None:
    """Body of ``python -m radixrt.<name>``: runs a function and reports a ConfigError to the
    supervisor.

    Args:
        entry: "module:function" of ``(config, channels, arguments, supervisor)``.
    """
    main = _imported(entry)
    parser = argparse.ArgumentParser(prog=f"radixrt.{name}")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--engine", type=int, required=True, help="number of the engine")
    parser.add_argument("--replica", type=int, help="number of the replica")
    parser.add_argument("--start", type=int, default=0, help="number of the replica's start")
    parser.add_argument(
        "--link-fd", type=int, required=True, help="socket whose other end the supervisor has"
    )
    parser.add_argument("--label", default=name, help="name in the log")
    parser.add_argument("--rank", type=int, default=0, help="tensor-parallel rank of a worker")
    parser.add_argument("--listen-fd", type=int, default=-1, help="bound socket of the api process")
    parser.add_argument("--kept-fd", type=int, default=-1, help="memory that outlives the process: of a worker its KV pool, of a scheduler the record of it")  # fmt: skip
    arguments = parser.parse_args()
    end = socket.socket(fileno=arguments.link_fd)
    end.set_inheritable(False)  # only the end of this process is its death
    supervisor = SupervisorLink(Link(end, ServerStatus))
    start_thread(_end_with_supervisor, supervisor, arguments.run_dir, name="supervisor")
    supervisor.is_told.wait()
    signal.signal(signal.SIGTERM, _exit_quietly)
    run_dir: Path = arguments.run_dir
    config = read_config(run_dir)
    channels = Channels(run_dir, arguments.engine, arguments.replica, arguments.start)
    Heartbeat(channels.heartbeat_file(name, arguments.rank)).keep_beating()
    set_up_logging(arguments.label, config.log_level)
    try:
        main(config, channels, arguments, supervisor)
    except ConfigError as error:
        supervisor.tell(CannotStart(str(error)))
        sys.exit(EXIT_CONFIG_ERROR)


def _imported(entry: str) -> Callable[..., None]:
    """The function of an entry. Garbage collection is off while its module imports torch or
    transformers: what an import makes is no garbage, and looking through it again and again takes
    a fifth of the time. Nor does the collector visit it later."""
    module, _, function = entry.partition(":")
    gc.disable()
    main: Callable[..., None] = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    return main


def take_replica_share(num_replicas: int) -> None:
    """Let this thread, and those that it starts, claim the ``1 / num_replicas`` part of the CPU
    time of a busy machine.

    All replicas compete with one api and one tokenizer process. With equal claims, prompts wait
    there, and the replicas compute more steps, of fewer sequences each.
    """
    os.nice(round(math.log(num_replicas, NICE_STEP)))


def set_up_logging(name: str, level: str) -> None:
    """Log to stderr, one line a record, with the process's name."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {name:<9} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def _exit_quietly(signum: int, frame: object) -> None:
    logging.shutdown()
    os._exit(0)  # there is nothing to save, and a regular exit with torch takes a second


def _end_with_supervisor(supervisor: SupervisorLink, run_dir: Path) -> None:
    supervisor.follow()
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)
