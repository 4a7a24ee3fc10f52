"""Refuses JSON bodies with too many values before they are parsed.

Parsing holds the event loop, and so every stream: 32 MB of ``[]`` took 30 s. Two bounds keep it to some tens of
milliseconds: one on arrays and objects, which are expensive to make, and one on all values, which lists of token ids need.
Brackets and commas bound both from above. Where that bound is exceeded, they may stand in strings, as in a prompt that
quotes JSON: a process of its own counts those outside of strings.
"""

import asyncio
import sys

from radixrt.api.http import json_size
from radixrt.api.http.json_size import JsonSize, upper_bound
from radixrt.base.errors import RequestError

MAX_CONTAINERS = 50_000
MAX_VALUES = 1_000_000

COUNT_TIMEOUT_S = 10.0
MAX_COUNTING = 2
"""Processes at a time."""

_COUNT = (sys.executable, "-I", "-S", json_size.__file__)


class JsonBounds:
    """Counts the values of bodies. Lives in one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_COUNTING)

    async def check(self, body: bytes) -> None:
        """Raises:
        RequestError: the body holds too many values.
        """
        size = upper_bound(body)
        if _is_too_large(size):
            size = await self._exact_size(body)
        if _is_too_large(size):
            raise RequestError(
                f"The body holds {size.containers} arrays and objects and {size.values} values; at most "
                f"{MAX_CONTAINERS} and {MAX_VALUES} are read. Send token ids as one list, or split the request.",
                status=413,
            )

    async def _exact_size(self, body: bytes) -> JsonSize:
        """Scanning holds Python's lock, so that a thread would not help; one that takes too long counts as too large."""
        async with self._free:
            process = await asyncio.create_subprocess_exec(
                *_COUNT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                async with asyncio.timeout(COUNT_TIMEOUT_S):
                    output, _ = await process.communicate(body)
            except TimeoutError:
                return upper_bound(body)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        containers, values = map(int, output.split())
        return JsonSize(containers, values)


def _is_too_large(size: JsonSize) -> bool:
    return size.containers > MAX_CONTAINERS or size.values > MAX_VALUES
