"""Reads a server's state over HTTP, and computes rates between readings."""

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Any

import msgspec

from radixrt.base.errors import RadixrtError
from radixrt.kv.cache_stats import CacheStats
from radixrt.messages.cache_tree import CacheTree
from radixrt.messages.stats import SchedulerStats

TIMEOUT_S = 5
TREE_LEVELS = 3
TREE_CHILDREN = 12
WINDOW_S = 10.0
"""Seconds over which rates are computed."""


class ServerAwayError(RadixrtError):
    """No radixrt server answers; the message names the next step."""


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    served_model_name: str | None


class _Engine(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    page_size: int
    kv_bytes_per_token: int


class _ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    settings: _Settings
    engine: _Engine
    stats: SchedulerStats


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A server's state at one time."""

    time_s: float
    """On the monotonic clock."""
    model: str
    device: str
    kv_bytes_per_token: int
    stats: SchedulerStats
    cache: CacheStats
    tree: CacheTree


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
        info = self._get("/get_server_info", _ServerInfo)
        tree_path = f"/v1/cache/tree?depth={TREE_LEVELS}&children={TREE_CHILDREN}"
        reading = Reading(
            time_s=time.monotonic(),
            model=info.settings.served_model_name or info.settings.model_path,
            device=info.engine.device,
            kv_bytes_per_token=info.engine.kv_bytes_per_token,
            stats=info.stats,
            cache=CacheStats.of(info.stats, info.engine.page_size),
            tree=self._get(tree_path, CacheTree),
        )
        self._remember(reading)
        return reading

    def rates(self) -> Rates:
        """Rates over the kept readings, of which there must be one."""
        return rates_between(self._readings[0], self._readings[-1])

    def _remember(self, reading: Reading) -> None:
        last = self._readings[-1] if self._readings else None
        if last is not None and reading.cache.prompt_tokens < last.cache.prompt_tokens:
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


def rates_between(first: Reading, last: Reading) -> Rates:
    """Rates between two readings of one server, which may be the same."""
    seconds = last.time_s - first.time_s
    if seconds <= 0:
        return Rates(seconds=0.0)
    prompt = last.cache.prompt_tokens - first.cache.prompt_tokens
    cached = last.cache.cached_tokens - first.cache.cached_tokens
    output = last.stats.output_tokens - first.stats.output_tokens
    evicted = last.cache.evicted_tokens - first.cache.evicted_tokens
    return Rates(
        seconds=seconds,
        hit_rate=cached / prompt if prompt else None,
        prompt_tokens_per_s=prompt / seconds,
        output_tokens_per_s=output / seconds,
        evicted_tokens_per_s=evicted / seconds,
    )
