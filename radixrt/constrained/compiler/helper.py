"""Starts, asks and kills one helper process; the parent's side of the pipes."""

import asyncio
import contextlib
import os
import signal
import sys

from radixrt.constrained.compiler import jobs
from radixrt.constrained.constraint import Ebnf

START_LIMIT_S = 120.0
XGRAMMAR_IMPORT_S = 60.0
"""xgrammar imports torch: seconds where cores are free, many more where they are not."""

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""One thread a helper: it shares the machine with the scheduler and the worker."""


class HelperDied(Exception):
    """The process ended in the middle of a job (a library aborted, or memory ran out)."""


class HelperCannotStart(Exception):
    """The process says that it can't do its work, and another could not either."""


class Helper:
    """One process. It does one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._has_xgrammar = False
        self.is_prepared = asyncio.Event()
        """It has done what :meth:`preparation_s` allows time for."""

    @staticmethod
    async def start(config: jobs.PoolConfig) -> "Helper":
        """Returns when it has loaded the tokenizer.

        Raises:
            HelperCannotStart: the helper reports why.
            HelperDied: it ended without a report.
            TimeoutError: it took more than START_LIMIT_S.
        """
        creating = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a file in the user's folder must not replace a library
                "-m",
                "radixrt.constrained",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT},
            )
        )
        try:
            process = await asyncio.shield(creating)
        except (
            asyncio.CancelledError
        ):  # a process that is being created can't be killed: wait until it exists
            await Helper(await creating).kill()
            raise
        helper = Helper(process)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                reply = await helper._ask(jobs.encode(config))
        except BaseException:
            await helper.kill()
            raise
        if not isinstance(reply, jobs.Ready):
            await helper.kill()
            raise HelperCannotStart(getattr(reply, "reason", repr(reply)))
        return helper

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def preparation_s(self, job: jobs.Job) -> float:
        """Seconds that this helper may take before it begins a job; they don't count for the job."""
        needs_import = isinstance(job, jobs.CompileJob) and isinstance(job.constraint, Ebnf)
        return XGRAMMAR_IMPORT_S if needs_import and not self._has_xgrammar else 0.0

    async def do(self, job: jobs.Job) -> jobs.Reply:
        """Raises:
        HelperDied: it ended before it answered.
        """
        reply = await self._ask(jobs.encode(job))
        if isinstance(reply, jobs.Prepared):
            self._has_xgrammar = True
            self.is_prepared.set()
            reply = await self._read()
        return reply

    async def _ask(self, body: bytes) -> jobs.Reply:
        assert self._process.stdin
        try:
            self._process.stdin.write(jobs.frame(body))
            await self._process.stdin.drain()
        except (ConnectionError, BrokenPipeError) as error:
            raise HelperDied(_how_it_ended(await self._process.wait())) from error
        return await self._read()

    async def _read(self) -> jobs.Reply:
        assert self._process.stdout
        try:
            head = await self._process.stdout.readexactly(jobs.LENGTH.size)
            reply = await self._process.stdout.readexactly(*jobs.LENGTH.unpack(head))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise HelperDied(_how_it_ended(await self._process.wait())) from error
        return jobs.decode_reply(reply)

    async def kill(self) -> None:
        """Returns when the process is gone and its pipes are closed, also if this call is cancelled."""
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._process.stdin and self._process.stdout:
            self._process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.wait_closed()
            await self._process.stdout.read()


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
