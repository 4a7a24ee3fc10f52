"""The loop of a helper process: one job after another, within a memory limit. It ends with its parent."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from radixrt.base.errors import RadixrtError, RequestError
from radixrt.constrained.compiler import jobs
from radixrt.constrained.compiler.route import compile_constraint, refusal
from radixrt.constrained.constraint import AnyJson, Ebnf, Regex
from radixrt.constrained.tokenizer_facts import TokenizerFacts

_PR_SET_PDEATHSIG = 1
_RECURSION_LIMIT = 10_000
"""Schemas are trees, walked by recursion; deeper ones are refused."""


def main(parent_pid: int) -> None:
    """Read jobs from standard input until it ends; replies go to the original standard output."""
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the prints of libraries are no frames
    requests = sys.stdin.buffer
    first = jobs.read_frame(requests)
    if first is None:
        return
    config = jobs.decode_config(first)
    try:
        facts = TokenizerFacts.load(
            Path(config.tokenizer_json),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        _warm_up(facts, config)
    except RadixrtError as error:
        _send(replies, jobs.Failed(str(error)))
        return
    _send(replies, jobs.Ready())
    sys.setrecursionlimit(_RECURSION_LIMIT)
    memory = _MemoryLimit(config.memory_limit_bytes)
    while (body := jobs.read_frame(requests)) is not None:
        _answer(body, replies, facts, config, memory)
        if memory.is_half_used():
            return  # this memory is not returned any more; the parent starts another helper


def _answer(
    body: bytes,
    replies: BinaryIO,
    facts: TokenizerFacts,
    config: jobs.PoolConfig,
    memory: "_MemoryLimit",
) -> None:
    job = jobs.decode_job(body)
    needs_xgrammar = isinstance(job, jobs.CompileJob) and isinstance(job.constraint, Ebnf)
    if needs_xgrammar and memory.import_xgrammar():
        _send(replies, jobs.Prepared())
    try:
        reply = jobs.frame(jobs.encode(_do(job, facts, config)))
    except Exception as error:
        reply = jobs.frame(jobs.encode(_failure(job, error)))
    replies.write(reply)
    replies.flush()


def _failure(job: jobs.Job, error: Exception) -> jobs.Reply:
    if isinstance(error, MemoryError) or "std::bad_alloc" in str(error):
        return jobs.OutOfMemory()
    if isinstance(error, OverflowError) and isinstance(job, jobs.CompileJob):
        reason = "The schema has an integer beyond 64 bits; write it as a number with an exponent."
        return jobs.Refused(reason, 400, "structured", "grammar")
    return jobs.Failed(f"{type(error).__name__}: {str(error)[:500]}")


def _do(job: jobs.Job, facts: TokenizerFacts, config: jobs.PoolConfig) -> jobs.Reply:
    if isinstance(job, jobs.ValidateJob):
        from radixrt.constrained.checks.validation import (
            validate_text,  # here: jsonschema takes a moment
        )

        return jobs.ValidateDone(validate_text(job.schema, job.text))
    try:
        return jobs.CompileDone(compile_constraint(job.constraint, facts, config.options))
    except RecursionError:
        error = refusal(job.constraint, "It is nested too deeply.")
    except RequestError as caught:
        error = caught
    return jobs.Refused(error.message, error.status, error.param, error.code)


def _warm_up(facts: TokenizerFacts, config: jobs.PoolConfig) -> None:
    """Build the libraries' tries of all tokens, for which the first jobs would wait otherwise."""
    compile_constraint(AnyJson(), facts, config.options)
    compile_constraint(Regex(pattern="a"), facts, config.options)


def _send(replies: BinaryIO, reply: jobs.Reply) -> None:
    replies.write(jobs.frame(jobs.encode(reply)))
    replies.flush()


def _die_with(parent_pid: int) -> None:
    """Linux kills this process when its parent ends, however busy it is. Elsewhere the end of standard input
    has to do, which a busy helper sees after its job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


class _MemoryLimit:
    """Limits the growth of this process' writable memory after its start.

    RLIMIT_DATA, not RLIMIT_AS: the address space of a process with torch in it says nothing of its use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._has_xgrammar = False
        self._set()

    def import_xgrammar(self) -> bool:
        """Import xgrammar, and torch with it; their memory does not count. False: it is imported already."""
        if self._has_xgrammar:
            return False
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        import xgrammar  # noqa: F401

        self._has_xgrammar = True
        self._set()
        return True

    def is_half_used(self) -> bool:
        """Whether the memory left by finished jobs takes up half of the limit."""
        if "xgrammar" in sys.modules and not self._has_xgrammar:
            self._has_xgrammar = True  # imported by a job for a JSON schema
            self._set()
        return _data_bytes() > self._baseline + self._limit_bytes // 2

    def _set(self) -> None:
        self._baseline = _data_bytes()
        limit = self._baseline + self._limit_bytes
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1])
            )


def _data_bytes() -> int:
    """Private writable memory of this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = (line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
