"""The zygote and its forks, the helpers: a helper does one job after another, within a memory
limit. They end with their parent."""

import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path

from tokenizers import Tokenizer

from radixrt.base.errors import RadixrtError, RequestError
from radixrt.base.token_bytes import give_memory_back
from radixrt.constrained.backends.tag_schemas import TagSchemas
from radixrt.constrained.compiler import jobs
from radixrt.constrained.compiler.cache import memory_of
from radixrt.constrained.compiler.compilation import advise, compile_constraint, refusal
from radixrt.constrained.constraint import AnyJson, JsonSchema, Regex
from radixrt.constrained.json_schema import position
from radixrt.constrained.tokenizer_facts import TokenizerFacts, read_tokenizer

_PR_SET_PDEATHSIG = 1
_has_tried = False
"""Whether the zygote has loaded the tokenizer, or has failed to."""
_RECURSION_LIMIT = 10_000
"""Schemas are trees, walked by recursion; deeper ones are refused."""


def main(parent_pid: int) -> None:
    """The zygote: load the tokens, then make helpers as the parent asks on standard input."""
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    control = socket.socket(fileno=os.dup(0))
    with open(
        os.devnull
    ) as nothing:  # else a helper would hold the socket open when this process has ended
        os.dup2(nothing.fileno(), 0)
    zygote = os.getpid()
    first = jobs.read_frame(control.makefile("rb"))
    if first is None:
        return
    config = jobs.decode_config(first)
    try:
        facts = TokenizerFacts.load(
            Path(config.tokenizer_json),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            read=lambda file: _tokenizer_in_zygote(file, zygote),
        )
        _warm_up(facts, config)
    except RadixrtError as error:
        _send(control, jobs.Failed(str(error)))
        return
    give_memory_back()
    _send(control, jobs.Ready())
    gc.freeze()
    while (helper := _next_helper(control, facts, config)) is not None:
        control.close()
        _die_with(zygote)
        _work(helper, facts, config)
        return


def _next_helper(
    control: socket.socket, facts: TokenizerFacts, config: jobs.PoolConfig
) -> socket.socket | None:
    """In a helper, a fork of this process, the socket of its jobs. In this process, None once the
    parent is gone."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    before = signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    waiting.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj == wake:
                os.read(wake, 4096)
                _report_ends(control)
                continue
            head, fds, _, _ = socket.recv_fds(control, jobs.LENGTH.size, 2)
            if not head:
                return None
            command = jobs.decode_command(control.recv(*jobs.LENGTH.unpack(head)))
            if isinstance(command, jobs.Kill):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(command.pid, signal.SIGKILL)
                continue
            if isinstance(command, jobs.Load):
                _load_tokenizer(facts, config)
                continue
            if pid := os.fork():
                for fd in fds:
                    os.close(fd)
                _send(control, jobs.Forked(pid))
                continue
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            waiting.close()
            os.close(wake)
            os.close(woken)
            position.share(fds[1])
            os.close(fds[1])
            return socket.socket(fileno=fds[0])


def _report_ends(control: socket.socket) -> None:
    """A pid can't be used again before this: a helper is a child until its end is noticed here."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _send(control, jobs.Ended(pid, os.waitstatus_to_exitcode(status)))


def _load_tokenizer(facts: TokenizerFacts, config: jobs.PoolConfig) -> None:
    """Load the tokenizer for all helpers. Where that fails, a job meets the failure itself."""
    global _has_tried
    _has_tried = True
    if not facts.has_tokenizer:
        with contextlib.suppress(Exception):
            compile_constraint(Regex(pattern="a"), facts, config.options)
            gc.freeze()


class _NeedsTokenizer(BaseException):
    """A job needs the tokenizer, whose loading takes time that is not the job's."""


def _tokenizer_in_zygote(file: Path, zygote: int) -> Tokenizer:
    """The tokenizer, read in the process ``zygote``; interrupts a job that begins to read it."""
    if os.getpid() != zygote and not _has_tried:
        raise _NeedsTokenizer
    return read_tokenizer(file)


def _work(helper: socket.socket, facts: TokenizerFacts, config: jobs.PoolConfig) -> None:
    """The life of a helper: jobs and replies on its socket, until the parent closes it."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    memory = _MemoryLimit(config.memory_limit_bytes)
    requests, replies = helper.makefile("rb"), helper.makefile("wb")
    while (body := jobs.read_frame(requests)) is not None:
        replies.write(_answer(jobs.decode_job(body), facts, config))
        replies.flush()
        if memory.is_half_used():
            return  # this memory is not returned any more; the parent starts another helper


def _answer(job: jobs.Job, facts: TokenizerFacts, config: jobs.PoolConfig) -> bytes:
    """The frame of the reply."""
    position.note("")
    try:
        return jobs.frame(jobs.encode(_do(job, facts, config)))
    except MemoryError:
        return jobs.frame(jobs.encode(jobs.OutOfMemory()))
    except _NeedsTokenizer:
        return jobs.frame(jobs.encode(jobs.NeedsTokenizer()))
    except Exception as error:
        return jobs.frame(jobs.encode(_failure(job, error)))


def _failure(job: jobs.Job, error: Exception) -> jobs.Reply:
    if isinstance(error, OverflowError) and not isinstance(job, jobs.ValidateJob):
        reason = "The schema has an integer beyond 64 bits; write it as a number with an exponent."
        return jobs.Refused(reason, 400, "structured", "grammar")
    return jobs.Failed(f"{type(error).__name__}: {str(error)[:500]}")


def _do(job: jobs.Job, facts: TokenizerFacts, config: jobs.PoolConfig) -> jobs.Reply:
    if isinstance(job, jobs.ValidateJob):
        from radixrt.constrained.json_schema.validation import (
            validate_text,  # here: jsonschema takes a moment
        )

        return jobs.ValidateDone(validate_text(job.schema, job.text))
    try:
        if isinstance(job, jobs.AdviseJob):
            return jobs.AdviseDone(advise(job.constraint, facts, config.options))
        schemas = TagSchemas(job.schemas)
        compiled = compile_constraint(job.constraint, facts, config.options, schemas)
        return jobs.CompileDone(compiled, memory_of(compiled), schemas.made)
    except RecursionError:
        error = refusal(job.constraint, "It is nested too deeply.")
    except RequestError as caught:
        error = caught
    return jobs.Refused(error.message, error.status, error.param, error.code)


def _warm_up(facts: TokenizerFacts, config: jobs.PoolConfig) -> None:
    """Import the libraries and build a trie of all tokens, so that a helper finds them done."""
    from radixrt.constrained.json_schema import validation  # noqa: F401

    for schema in ('{"type": "object"}', '{"enum": [1], "not": {"type": "string"}}'):
        compile_constraint(JsonSchema(schema=schema), facts, config.options)
    compile_constraint(AnyJson(), facts, config.options)
    if facts.has_tokenizer:
        compile_constraint(Regex(pattern="a"), facts, config.options)


def _send(control: socket.socket, reply: jobs.Reply) -> None:
    control.sendall(jobs.frame(jobs.encode(reply)))


def _die_with(parent_pid: int) -> None:
    """Linux kills this process when its parent ends, however busy it is. Elsewhere the end of
    standard input has to do, which a busy helper sees after its job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


class _MemoryLimit:
    """Limits the growth of this process' writable memory after its start.

    RLIMIT_DATA, not RLIMIT_AS: address space that is reserved says nothing of its use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._half = _data_bytes() + limit_bytes // 2
        limit = _data_bytes() + limit_bytes
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def is_half_used(self) -> bool:
        """Whether the memory left by finished jobs takes up half of the limit."""
        return _data_bytes() > self._half


def _data_bytes() -> int:
    """Private writable memory of this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = (line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
