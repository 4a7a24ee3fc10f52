"""Counts the requests and tokens of one key, and refuses those above its limits."""

import math
import time
from collections.abc import Callable

from radixrt.base.api_keys import KeyLimits
from radixrt.base.errors import RequestError

BURST_S = 60.0
"""A key that was idle for this long may use its whole rate of a minute at once."""

BUSY_RETRY_S = 1
"""Retry-After of a key whose requests are all in flight."""


class _Bucket:
    """A token bucket: refilled at a rate up to the amount of a minute. It may be overdrawn, since
    the number of tokens is known only when they are there; the debt is paid back first."""

    def __init__(self) -> None:
        self._used = 0.0
        """Not yet refilled."""
        self._at = 0.0

    def take(self, amount: float, per_minute: int | None, now: float) -> None:
        if per_minute is not None:
            self._refill(per_minute, now)
            self._used += amount

    def wait_s(self, amount: float, per_minute: int, now: float) -> float:
        """Seconds until ``amount`` is there; 0: it is there now."""
        self._refill(per_minute, now)
        return max(0.0, (self._used + amount - per_minute) * BURST_S / per_minute)

    def _refill(self, per_minute: int, now: float) -> None:
        self._used = max(0.0, self._used - (now - self._at) * per_minute / BURST_S)
        self._at = now


class KeyUse:
    """The use of one key.

    Args:
        clock: seconds from any fixed moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.limits = KeyLimits()
        """The limits that the last request came with."""
        self.in_flight = 0
        """Requests."""
        self._requests, self._tokens = _Bucket(), _Bucket()

    def begin(self, limits: KeyLimits) -> None:
        """A request has come.

        Raises:
            RequestError: it is over a limit.
        """
        self.limits, now = limits, self._clock()
        if (limit := limits.max_parallel_requests) is not None and self.in_flight >= limit:
            raise _over("max_parallel_requests", limit, BUSY_RETRY_S)
        if (rate := limits.requests_per_minute) is not None:
            self._check(self._requests, "requests_per_minute", rate, now)
        if (rate := limits.tokens_per_minute) is not None:
            self._check(self._tokens, "tokens_per_minute", rate, now)
        self._requests.take(1, limits.requests_per_minute, now)
        self.in_flight += 1

    def end(self) -> None:
        """A request that :meth:`begin` has let through is over."""
        self.in_flight -= 1

    def count_tokens(self, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        self._tokens.take(tokens, self.limits.tokens_per_minute, self._clock())

    def _check(self, bucket: _Bucket, limit: str, rate: int, now: float) -> None:
        if wait_s := bucket.wait_s(1, rate, now):
            raise _over(limit, rate, math.ceil(wait_s))


def _over(limit: str, value: int, retry_after_s: int) -> RequestError:
    return RequestError(
        f"This API key is over its limit of {value} ({limit}); retry after {retry_after_s} s.",
        status=429,
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )
