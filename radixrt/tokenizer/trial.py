"""Tries a tokenizer in a child process with limits, before this process loads it.

A tokenizer.json is a program: patterns that backtrack without end, replacements that double the
text. Neither can be seen in the file, and the library holds Python's lock meanwhile, or aborts the
process.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.tokenizer.vocabulary import Vocabulary, entry_of

BASE_CPU_S, CPU_S_PER_MB = 3, 0.5
"""Most CPU time: for any tokenizer, and for each megabyte of its file. Gemma's, of 33 MB, takes 3 s
with transformers."""
BASE_BYTES, BYTES_PER_BYTE = 512 << 20, 32
"""Most memory beyond that of this process, in the same way."""
MAX_WAIT_S = 120.0
"""Longest wait for the child on a busy machine."""

MAX_ADDED_TOKENS = 1 << 16
"""The segments of chats are found by comparing them. Gemma has 6,500."""

PROBES = [
    "The quick brown fox jumps over the lazy dog's 12,345 back.\n\n\tEnd; of (text)! ",
    *(piece * (2048 // len(piece)) + "!" for piece in ("a", "A", "0", " ", "\n", "=", "a ", "aA0_", "ä", "語")),
]  # fmt: skip


class _Content(msgspec.Struct):
    """The part of a tokenizer.json that is checked."""

    added_tokens: list[msgspec.Raw] = []


def try_tokenizer(config: ServerConfig) -> None:
    """Load the tokenizer and encode some lines, in a child process. One that is in the cache has
    been tried; the child adds a large one.

    Raises:
        ConfigError: it takes too much time or memory, or ends its process.
    """
    folder = Path(config.tokenizer_path or config.model_path)
    file = folder / "tokenizer.json"
    entry = None if config.trust_remote_code else entry_of(folder)
    if not file.is_file() or (entry is not None and entry.is_dir()):
        return
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_Content)
    except (msgspec.MsgspecError, RecursionError):
        return  # loading it says what is wrong
    if len(content.added_tokens) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{file} adds {len(content.added_tokens)} tokens to its vocabulary; at most {MAX_ADDED_TOKENS} are possible."
        )
    import transformers  # noqa: F401 (both processes need it)

    megabytes = file.stat().st_size / (1 << 20)
    cpu_s = round(BASE_CPU_S + CPU_S_PER_MB * megabytes)
    more = BASE_BYTES + BYTES_PER_BYTE * file.stat().st_size
    child = os.fork()
    if not child:
        _run(config, cpu_s, more)
    if status := _wait(child):
        raise ConfigError(
            f"The tokenizer in {folder} can't be used: it did not load and encode {len(PROBES)} lines within {cpu_s} s of CPU time and "
            f"{more >> 20} MiB of memory (exit status {status}). Its tokenizer.json may be damaged; name another with --tokenizer-path."
        )


def _run(config: ServerConfig, cpu_s: int, more_bytes: int) -> None:
    """The child. Errors that have a message come again in the parent."""
    status = 0
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
        os.dup2(sys.stderr.fileno(), 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, 2 * (pages * resource.getpagesize() + more_bytes,))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        vocabulary = Vocabulary.load(config)
        for text in PROBES:
            vocabulary.encode(text, add_special_tokens=False)
    except MemoryError:
        status = 2
    except Exception:
        pass
    except BaseException:  # a panic of the library
        status = 3
    finally:
        os._exit(status)


def _wait(child: int) -> int:
    """The exit status of the child; below 0: the signal that has ended it."""
    until = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL
