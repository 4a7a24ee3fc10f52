"""Everything that a server holds of the system: processes, files, sockets, semaphores, shared
memory."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.servers import Server

SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Holdings:
    """Of the supervisor and the api process, which outlive engines."""

    processes: tuple[str, ...]
    """Modules of all processes of the server, in alphabetical order; helpers of the tokenizer
    process apart."""
    num_fds: dict[str, int]
    """Without those of HTTP connections."""
    num_threads: dict[str, int]

    @staticmethod
    def of(server: Server) -> "Holdings":
        modules, fds, threads = [], {}, {}
        supervisor = psutil.Process(server.process.pid)
        for process in (supervisor, *server.family()):
            module = module_of(process)
            if module != "constrained":
                modules.append(module)
            if module in ("launch_server", "api"):
                fds[module] = process.num_fds() - len(process.net_connections("tcp"))
                threads[module] = process.num_threads()
        return Holdings(tuple(sorted(modules)), fds, threads)


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Files of shared memory, which semaphores are as well, that processes have mapped or open."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            found |= {path for path in paths if path.startswith(SHARED_MEMORY)}
    return found


def module_of(process: psutil.Process) -> str:
    """``worker`` for ``python -m radixrt.worker``; "" if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # nor has a zombie a command
        command = process.cmdline()
        return command[command.index("-m") + 1].removeprefix("radixrt.") if "-m" in command else ""
    return ""


def processes_of(server: Server) -> list[psutil.Process]:
    """All processes whose temporary folder is the server's, those of dead engines included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(server.temp_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def files_left(server: Server) -> list[str]:
    """Files in the folder of the server that are not of its engine."""
    (run_dir,) = server.temp_dir.iterdir()
    folders = [p.name for p in run_dir.iterdir() if p.is_dir()]
    replicas = [name for name in folders if "." in name]
    engines = sorted({*folders} - {*replicas}, key=int)
    other = {p.name for p in run_dir.iterdir() if not p.is_dir()}
    expected = {
        "config.json",
        "tokenizer.json",
        "token_bytes.msgpack",
        "tokenizer-api",
        "heartbeat-api",
    }
    return engines[:-1] + replicas[1:] + sorted(other - expected)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Raises:
    AssertionError: the condition does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
