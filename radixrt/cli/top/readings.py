"""Reads a server's state over HTTP, and computes rates between readings."""

import http.client
import urllib.error
import urllib.request
from collections import deque
from typing import Any

import msgspec

from radixrt.base.errors import RadixrtError
from radixrt.kv.reading import Reading

TIMEOUT_S = 5
LIVE_PATH = "/v1/live?depth=3&children=12"
WINDOW_S = 10.0
"""Seconds over which rates are computed."""


class ServerAwayError(RadixrtError):
    """No radixrt server answers; the message names the next step."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates over the last seconds; None: not known yet."""

    seconds: float
    hit_rate: float | None = None
    """Cached share of the prompt tokens."""
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    evicted_tokens_per_s: float | None = None


class ServerWatch:
    """Reads a server's state, and keeps the readings of the last seconds."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """
        Args:
            url: address of the server, with or without ``/v1`` at its end.
            api_key: key of the server.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._readings: deque[Reading] = deque()

    def read(self) -> Reading:
        """Raises:
        ServerAwayError: no radixrt server answers.
        """
        reading: Reading = self._get(LIVE_PATH, Reading)
        if reading.engine is None:
            raise ServerAwayError(self._refusal(LIVE_PATH, 403))
        self._remember(reading)
        return reading

    def rates(self) -> Rates:
        """Rates over the kept readings, of which there must be one."""
        return rates_between(self._readings[0], self._readings[-1])

    def _remember(self, reading: Reading) -> None:
        last = self._readings[-1] if self._readings else None
        if last is not None and prompt_tokens(reading) < prompt_tokens(last):
            self._readings.clear()  # the server was restarted
        self._readings.append(reading)
        while reading.time_s - self._readings[0].time_s > WINDOW_S and len(self._readings) > 2:
            self._readings.popleft()

    def _get(self, path: str, kind: type[Any]) -> Any:
        if not self.url.startswith(("http://", "https://")):
            raise ServerAwayError(
                f"--url must begin with http:// or https://, not {self.url!r:.80}."
            )
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except urllib.error.HTTPError as error:
            raise ServerAwayError(self._refusal(path, error.code)) from error
        except msgspec.MsgspecError as error:
            raise ServerAwayError(
                f"The answer of {self.url}{path} does not fit this version of radixrt: {error}."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last: no such URL
            reason = getattr(error, "reason", error)
            raise ServerAwayError(
                f"No server answers at {self.url} ({reason}). Start one with `radixrt serve`, or name another with "
                "--url."
            ) from error

    def _refusal(self, path: str, status: int) -> str:
        if status == 401:
            return f"The server at {self.url} wants its key: give it with --api-key."
        if status == 403:
            return f"The server at {self.url} wants the key of an admin: give it with --api-key."
        if status == 404:
            return f"The server at {self.url} has no {path.partition('?')[0]}; is it a radixrt server of this version?"
        return (
            f"The server at {self.url} answered {path} with status {status}; its log may say why."
        )


def prompt_tokens(reading: Reading) -> int:
    """Of all admitted sequences since start."""
    assert reading.engine is not None
    return reading.engine.cache.prompt_tokens


def rates_between(first: Reading, last: Reading) -> Rates:
    """Rates between two readings of one server, which may be the same."""
    seconds = last.time_s - first.time_s
    before, after = first.engine, last.engine
    if seconds <= 0 or before is None or after is None:
        return Rates(seconds=0.0)
    prompt = after.cache.prompt_tokens - before.cache.prompt_tokens
    cached = after.cache.cached_tokens - before.cache.cached_tokens
    output = after.stats.output_tokens - before.stats.output_tokens
    evicted = after.cache.evicted_tokens - before.cache.evicted_tokens
    return Rates(
        seconds=seconds,
        hit_rate=cached / prompt if prompt else None,
        prompt_tokens_per_s=prompt / seconds,
        output_tokens_per_s=output / seconds,
        evicted_tokens_per_s=evicted / seconds,
    )
