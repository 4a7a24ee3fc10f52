"""Reads recorded requests whose prompts are lists of block ids.

Two formats, one JSON object a line, gzipped or not, told apart by their keys:

- ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}``, as
  Mooncake publishes its traces and as ``radixrt serve --request-log FILE`` writes them;
- the same with ``"runs": [[first_id, count], ...]`` in place of ``hash_ids``: ids that follow each
  other.

Either may have ``"session"``, a number, and ``"tool"``, 1 where the answer ended in a tool call;
only ``--hints`` and ``--closed-loop`` ask for them. A block is 512 tokens, the last one of a prompt
may be shorter. An id stands for the block and everything before it, so that two prompts share a
prefix exactly as far as their ids are equal.
"""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import ConfigError

BLOCK_TOKENS = 512

BlockIds = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class TraceRequest:
    """One recorded request."""

    arrival_s: float
    """Seconds since the recording began."""
    input_tokens: int
    output_tokens: int
    blocks: BlockIds
    """[number of blocks]; equal ids, equal prefixes."""
    session: int | None = None
    """Whose request it is, where the recording knows."""
    called_tool: bool = False
    """Its answer ended in a tool call."""


@dataclass(frozen=True)
class Trace:
    """Recorded requests in order of arrival."""

    name: str
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    runs: list[tuple[int, int]] | None = None
    session: int | None = None
    tool: int = 0


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> Trace:
    """Read a trace, or its first ``limit`` requests, and let them arrive ``speed`` times as fast.

    Raises:
        ConfigError: there is no such file, or a line is not a request.
    """
    requests: list[TraceRequest] = []
    dense = _DenseIds()
    for line in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        try:
            request = _request(line, dense, speed)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {len(requests) + 1} is not a recorded request: {error}. Each line needs "
                "timestamp, input_length, output_length, and hash_ids or runs."
            ) from error
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path} holds no request.")
    requests.sort(key=lambda request: request.arrival_s)  # a server logs them as they end
    return Trace(path.name.split(".")[0], requests)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as stream:
            yield from (line for line in stream if line.strip())
    except OSError as error:
        raise ConfigError(f"The trace {path} can't be read: {error}.") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _request(line: bytes, dense: "_DenseIds", speed: float) -> TraceRequest:
    row = msgspec.json.decode(line, type=_Line)
    if row.input_length < 1 or row.output_length < 0:
        raise ValueError("input_length must be at least 1 and output_length at least 0")
    if row.hash_ids is not None:
        blocks = dense.number(row.hash_ids)
    elif row.runs is not None:
        parts = [np.arange(first, first + count) for first, count in row.runs]
        blocks = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    else:
        raise ValueError("it has neither hash_ids nor runs")
    expected = -(-row.input_length // BLOCK_TOKENS)
    if len(blocks) != expected:
        raise ValueError(f"{row.input_length} tokens are {expected} blocks, not {len(blocks)}")
    arrival_s = row.timestamp / 1e3 / speed
    return TraceRequest(
        arrival_s,
        row.input_length,
        max(1, row.output_length),
        blocks.astype(np.int64),
        row.session,
        bool(row.tool),
    )


class _DenseIds:
    """Hashes of any size, numbered in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, hashes: list[int]) -> BlockIds:
        numbers = self._numbers
        return np.array([numbers.setdefault(h, len(numbers)) for h in hashes], dtype=np.int64)
