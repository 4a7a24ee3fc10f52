"""Logs requests (times, lengths, hashes of prefixes) for replays with ``radixrt bench cache``.

One JSON object a request, written when it ends, in the format of Mooncake's traces: ``timestamp``
of its arrival in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``:
one id for each block of 512 prompt tokens, equal if all tokens up to its end are equal. The hashes
are keyed with a random number of this server's start, so that they reveal nothing of the text; ids
of two logs can't be compared.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.kv.events import block_hashes, namespace_hash
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.messages.sequences import SequenceRequest, TokenBatch

log = logging.getLogger(__name__)

BLOCK_TOKENS = 512


class LoggedRequest(msgspec.Struct):
    """A line of the log."""

    timestamp: int
    """Time of its arrival, in milliseconds since the server began."""
    input_length: int
    output_length: int
    hash_ids: list[int]


class RequestLog:
    """Appends a line to a file for each request that ends.

    A line that can't be written, because the disk is full, is dropped and counted.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(
        self, path: Path | None, clock: Callable[[], float], kept: Path | None = None
    ) -> None:
        """
        Args:
            path: None: nothing is logged.
            kept: private file of this server, with which the scheduler of a later engine goes on
                with the log of the one before.
        """
        self._open: dict[int, LoggedRequest] = {}
        self.dropped = 0
        """Lines that could not be written."""
        self._is_on = path is not None
        if path is None:
            return
        goes_on = kept is not None and kept.exists()
        try:
            # every line whole, even if the process dies
            self._file = path.open("ab" if goes_on else "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--request-log {path} can't be written: {error}.") from error
        self._clock, self._begin, self._key = clock, clock(), secrets.token_hex(16)
        if kept is not None and goes_on:
            self._begin, self._key = msgspec.json.decode(kept.read_bytes(), type=tuple[float, str])
        elif kept is not None:
            kept.write_bytes(msgspec.json.encode((self._begin, self._key)))

    def arrived(self, request: SequenceRequest) -> None:
        if not self._is_on:
            return
        tokens = request.keys()
        milliseconds = int(1e3 * (self._clock() - self._begin))
        hash_ids = self._hash_ids(tokens, request.options.root)
        self._open[request.seq_id] = LoggedRequest(milliseconds, len(tokens), 0, hash_ids)

    def _hash_ids(self, tokens: TokenIds, root: CacheRoot) -> list[int]:
        """One id a block. The last block is padded with a token that does not exist."""
        missing = -len(tokens) % BLOCK_TOKENS
        packed = np.pad(tokens, (0, missing), constant_values=-1).tobytes()
        hashes = block_hashes(
            namespace_hash(root._replace(salt=self._key + root.salt)), packed, BLOCK_TOKENS
        )
        return np.frombuffer(hashes, dtype=np.uint64).tolist()

    def answered(self, batch: TokenBatch) -> None:
        """Count a step's tokens; log the requests that ended."""
        if not self._open:
            return
        for seq_id, output in batch.outputs.items():
            if seq_id in self._open:
                self._open[seq_id].output_length += len(output.token_ids)
            if output.finished is not None:
                self.ended(seq_id)
        for refused in batch.refused:
            self.ended(refused.seq_id)

    def ended(self, seq_id: int) -> None:
        """Log a request that has ended. Unknown ids are ignored."""
        logged = self._open.pop(seq_id, None)
        if logged is not None:
            self._write(msgspec.json.encode(logged) + b"\n")

    def _write(self, line: bytes) -> None:
        """Append a whole line or none. The warning comes with the first, second, fourth, … dropped
        line."""
        error: OSError | str = "the disk took a part of a line"
        try:
            written = self._file.write(line)
        except OSError as failed:
            written, error = 0, failed
        if written == len(line):
            return
        if written:
            with contextlib.suppress(OSError):
                self._file.seek(-written, 1)
                self._file.truncate()
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning("%d lines of --request-log were dropped: %s.", self.dropped, error)

    def refused(self, seq_id: int) -> None:
        """Forget a request that was never queued."""
        self._open.pop(seq_id, None)
