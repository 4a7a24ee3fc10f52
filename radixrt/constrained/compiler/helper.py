"""Starts the zygote, and asks and kills its helpers; the parent's side of the sockets.

The zygote is a process that has loaded the tokens and the libraries and does nothing but fork: a
helper costs milliseconds, also after one was killed.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from typing import BinaryIO

from radixrt.base.liveness.supervision import supervise
from radixrt.constrained.compiler import jobs
from radixrt.constrained.json_schema import position

START_LIMIT_S = 120.0
FORK_LIMIT_S = 60.0
"""Time for a fork, and for loading the tokenizer ahead of it."""

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""One thread a process: a helper shares the machine with the scheduler and the worker, and only a
process of one thread can be forked safely."""


class HelperDied(Exception):
    """The process ended in the middle of a job (a library aborted, or memory ran out)."""


class HelperCannotStart(Exception):
    """The zygote says that it can't do its work, and another could not either."""


class Zygote:
    """The process of which the helpers are forks; they end with it."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._forking = asyncio.Lock()
        self._forked: asyncio.Future[int] | None = None
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._listener: asyncio.Task[None] | None = None

    @staticmethod
    async def start(config: jobs.PoolConfig) -> "Zygote":
        """Returns when it has loaded the tokens.

        Raises:
            HelperCannotStart: it reports why.
            HelperDied: it ended without a report.
            TimeoutError: it took more than START_LIMIT_S.
        """
        ours, theirs = socket.socketpair()
        creating = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a file in the user's folder must not replace a library
                "-m",
                "radixrt.constrained",
                str(os.getpid()),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
        )
        try:
            process = await asyncio.shield(creating)
        except (
            asyncio.CancelledError
        ):  # a process that is being created can't be killed: wait until it exists
            await Zygote(await creating, ours).kill()
            raise
        finally:
            theirs.close()
        zygote = Zygote(process, ours)
        try:
            ours.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours.dup())
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.get_running_loop().sock_sendall(ours, jobs.frame(jobs.encode(config)))
                reply = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await zygote.kill()
            raise HelperDied(_how_it_ended(process.returncode or 0)) from error
        except BaseException:
            await zygote.kill()
            raise
        if not isinstance(reply, jobs.Ready):
            await zygote.kill()
            raise HelperCannotStart(getattr(reply, "reason", repr(reply)))
        zygote._listener = asyncio.create_task(zygote._listen(reader, writer))
        supervise(zygote._listener, "The receiving from the compiler helpers", may_return=True)
        return zygote

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def load_tokenizer(self) -> None:
        """Let it load the tokenizer. Helpers that are asked for meanwhile wait."""
        with contextlib.suppress(OSError):
            self._control.send(jobs.frame(jobs.encode(jobs.Load())))

    async def fork(self) -> "Helper":
        """A new helper.

        Raises:
            HelperDied: the zygote has ended.
            TimeoutError: it took too long.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        notes = position.shared()
        try:
            async with self._forking, asyncio.timeout(FORK_LIMIT_S):
                self._forked = asyncio.get_running_loop().create_future()
                frame = jobs.frame(jobs.encode(jobs.Fork()))
                socket.send_fds(self._control, [frame], [theirs.fileno(), notes.fileno()])
                pid = await self._forked
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException as error:
            self._forked = None
            ours.close()
            notes.close()
            if isinstance(error, OSError):
                raise HelperDied("its zygote has ended") from error
            raise
        finally:
            theirs.close()
        return Helper(pid, self, reader, writer, self._ends[pid], notes)

    def end(self, pid: int) -> None:
        """Kill a helper."""
        with contextlib.suppress(OSError):
            self._control.send(jobs.frame(jobs.encode(jobs.Kill(pid))))

    async def kill(self) -> None:
        """Returns when the process is gone; its helpers die with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._listener is not None:
            await asyncio.wait([self._listener])
        self._control.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out the zygote's reports until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                match await _read(reader):
                    case jobs.Forked(pid):
                        self._ends[pid] = asyncio.get_running_loop().create_future()
                        if self._forked is not None and not self._forked.done():
                            self._forked.set_result(pid)
                        else:  # whoever asked has gone
                            self.end(pid)
                    case jobs.Ended(pid, status):
                        self._ends.pop(pid).set_result(status)
        await self._process.wait()
        writer.close()
        for ended in self._ends.values():
            ended.set_result(-signal.SIGKILL)
        if self._forked is not None and not self._forked.done():
            self._forked.set_exception(HelperDied("its zygote has ended"))


@dataclasses.dataclass(eq=False)
class Helper:
    """One process. It does one job at a time."""

    pid: int
    _zygote: Zygote
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _ended: asyncio.Future[int]
    _notes: BinaryIO

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    async def do(self, job: jobs.Job) -> jobs.Reply:
        """Raises HelperDied if it ended before it answered."""
        try:
            self._writer.write(jobs.frame(jobs.encode(job)))
            await self._writer.drain()
            return await _read(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise HelperDied(_how_it_ended(await asyncio.shield(self._ended))) from error

    def advice(self) -> str:
        """What to change in a constraint that takes this helper too long."""
        return position.advice(self._notes)

    async def kill(self) -> None:
        """Returns when the process is gone."""
        if not self._ended.done():
            self._zygote.end(self.pid)
            await asyncio.shield(self._ended)
        self._writer.close()
        self._notes.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> jobs.Reply:
    head = await reader.readexactly(jobs.LENGTH.size)
    return jobs.decode_reply(await reader.readexactly(*jobs.LENGTH.unpack(head)))


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
