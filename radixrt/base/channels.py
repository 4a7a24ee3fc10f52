"""The addresses of the channels between a server's processes, as files in its run directory.

:mod:`radixrt.base.ipc` has the sockets. The supervisor, which has none, starts without ZeroMQ.
"""

import shutil
import stat
import tempfile
from pathlib import Path

from radixrt.base.errors import ConfigError

LONGEST_RUN_DIR = 72
"""Characters; a Unix socket's whole path may have 107 (on macOS 103)."""


class Channels:
    """The addresses of a server's channels, as files in its run directory.

    Each engine that the supervisor starts has a folder of its own there, so that nothing of a dead
    engine reaches the next. It is the tokenizer process's. So has each start of a replica, a
    scheduler with its workers, which can outlive the engine: it then belongs to the next one. Only
    the api process's inbox is the same for all engines.
    """

    def __init__(
        self, run_dir: Path, engine: int = 0, replica: int | None = None, start: int = 0
    ) -> None:
        """
        Args:
            engine: number of the engine, counted from the start of the server.
            replica: number of the replica whose scheduler and workers use the channels; None: those
                of api and tokenizer process.
            start: number of the replica's start, counted from the start of the server.
        """
        self.run_dir = run_dir
        self.engine = engine
        self.replica = replica
        self.start = start

    @staticmethod
    def make_run_dir() -> Path:
        """A fresh directory, mode 0700.

        Raises:
            ConfigError: its path is too long for a socket's address.
        """
        run_dir = Path(tempfile.mkdtemp(prefix="radixrt-"))
        if len(str(run_dir)) > LONGEST_RUN_DIR:
            run_dir.rmdir()
            raise ConfigError(
                f"The path of {run_dir} is too long for Unix sockets: set TMPDIR to a shorter one."
            )
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        Channels(run_dir).folder.mkdir(mode=0o700)
        return run_dir

    def of_model(self, model: int) -> "Channels":
        """The channels of one of several models, in a folder of its own, which is made."""
        run_dir = self.run_dir / f"m{model}"
        Channels(run_dir).folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Channels(run_dir)

    @property
    def folder(self) -> Path:
        """The files of this engine, or of this start of a replica; removed at its death."""
        name = str(self.engine) if self.replica is None else f"{self.replica}.{self.start}"
        return self.run_dir / name

    @property
    def tokenizer_file(self) -> Path:
        """The model's tokenizer.json, written by the tokenizer process for the processes that load
        grammars."""
        return self.run_dir / "tokenizer.json"

    @property
    def kept_adapters(self) -> Path:
        """The names and folders of the LoRA adapters of this replica, written by its scheduler when
        they change, so that its next start loads them again."""
        return self.run_dir / f"adapters{self.replica or 0}.json"

    def heartbeat_file(self, process: str, rank: int = 0) -> Path:
        """The record of a process; see :mod:`radixrt.base.liveness.heartbeat`. The api process
        outlives engines."""
        folder = self.run_dir if process == "api" else self.folder
        return folder / f"heartbeat-{process}{rank or ''}"

    def of_replica(self, replica: int, start: int) -> "Channels":
        """The channels of a start of a replica of this engine."""
        return Channels(self.run_dir, self.engine, replica, start)

    def address(self, sender: str, receiver: str) -> str:
        """For example ``ipc:///tmp/radixrt-x/0/api-tokenizer``. A replica has other addresses for
        each tokenizer process: ``ipc:///tmp/radixrt-x/1/scheduler-tokenizer.0.3``,
        ``ipc:///tmp/radixrt-x/0.3/tokenizer-scheduler.1``."""
        number = ""
        if receiver == "api":
            folder = self.run_dir
        elif receiver == "tokenizer":
            folder = self.run_dir / str(self.engine)
            number = "" if self.replica is None else f".{self.replica}.{self.start}"
        else:
            folder = self.folder
            number = f".{self.engine}"
        return f"ipc://{folder}/{sender}-{receiver}{number}"

    @property
    def attach_address(self) -> str:
        """At which a replica hears of the tokenizer process of the next engine."""
        return f"ipc://{self.folder}/attach"

    def next_engine(self) -> None:
        """Let further addresses be those of the next engine, and remove the files of this one.
        Replicas keep theirs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.engine += 1
        self.folder.mkdir(mode=0o700)
