"""Refuses JSON bodies with too many values before they are parsed.

Parsing and checking hold the event loop, and so every stream: 32 MB of ``[]`` took 30 s. The limits
keep each of them to some tens of milliseconds. Brackets, colons and commas bound the numbers of
values from above. Where that bound is exceeded, they may stand in strings, as in a prompt that
quotes JSON: a process of its own counts those outside of strings.
"""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from radixrt.api.http import json_size
from radixrt.api.http.json_size import JsonSize, upper_bound
from radixrt.base.errors import RequestError

LIMIT = JsonSize(containers=50_000, members=100_000, values=1_000_000)
"""Most values of a whole body."""

Result = TypeVar("Result")

TOKEN_FIELDS = frozenset({"prompt", "input_ids", "token_ids", "tokens"})
"""Fields that may hold token ids."""

MAX_OTHER_VALUES = 100_000
"""Outside of these fields: values that are checked one by one."""

COUNT_TIMEOUT_S = 10.0
MAX_COUNTING = 2
"""Processes at a time."""

_BLOCK = 1 << 18
"""Characters that are compared at once: some that fit into a core's cache."""

_COUNT = (sys.executable, "-I", "-S", json_size.__file__)


class JsonBounds:
    """Counts the values of bodies. Lives in one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_COUNTING)
        self._turn = asyncio.Lock()

    async def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work on a large body in a turn of the event loop of its own: that of two bodies would
        hold the loop for twice the time."""
        async with self._turn:
            result = work()
            await asyncio.sleep(0)
        return result

    async def check(self, body: bytes) -> None:
        """Raises RequestError if the body holds too many values."""
        bound = await self._check(body, LIMIT, "The body")
        if bound.values <= MAX_OTHER_VALUES:
            return
        others = await self.in_turn(lambda: _without_token_fields(body))
        limit = LIMIT._replace(values=MAX_OTHER_VALUES)
        await self._check(others, limit, f"Beside {', '.join(sorted(TOKEN_FIELDS))}, the body")

    async def _check(self, text: bytes, limit: JsonSize, where: str) -> JsonSize:
        """The size of the text, at most."""
        size = await asyncio.to_thread(upper_bound, text, partial(count, text))
        if size.exceeds(limit):
            size = await self._exact_size(text, size)
        if size.exceeds(limit):
            raise RequestError(
                f"{where} holds {size.containers} arrays and objects, {size.members} keys and {size.values} values; at "
                f"most {limit.containers}, {limit.members} and {limit.values} are read. Send token ids as one list, or "
                "split the request.",
                status=413,
            )
        return size

    async def _exact_size(self, body: bytes, bound: JsonSize) -> JsonSize:
        """Scanning holds Python's lock, so that a thread would not help. One that takes too long
        gives the bound, which is too large."""
        async with self._free:
            process = await asyncio.create_subprocess_exec(
                *_COUNT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                async with asyncio.timeout(COUNT_TIMEOUT_S):
                    output, _ = await process.communicate(body)
            except TimeoutError:
                return bound
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return JsonSize(*map(int, output.split()))


def count(text: bytes, character: bytes) -> int:
    """How often a character stands in a text. ``bytes.count`` takes longer and holds Python's lock:
    0.1 s for the five characters of a body of 26 MB, as a large image has.

    >>> count(b"[1, [2]]", b"[")
    2
    """
    characters, (wanted,) = np.frombuffer(text, np.uint8), character
    starts = range(0, len(characters), _BLOCK)
    blocks = (characters[start : start + _BLOCK] == wanted for start in starts)
    return int(sum(map(np.count_nonzero, blocks)))


def _without_token_fields(body: bytes) -> bytes:
    """The texts of the other fields; none of a body that is no JSON object, which its parser
    refuses."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return b""
    return b",".join(bytes(text) for name, text in fields.items() if name not in TOKEN_FIELDS)
