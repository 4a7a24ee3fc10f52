"""The callers of the API: finds the key of a request, checks its role, and holds its limits.

Without keys every client is a user; an admin is one on this machine, unless its request was
forwarded.
"""

import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from radixrt.api.http.browsers import asks_for_page
from radixrt.base.api_keys import ApiKey, KeyLimits, KeySource, digest_of
from radixrt.base.errors import ConfigError, RequestError
from radixrt.messages.requests import NO_TENANT, Tenant

log = logging.getLogger(__name__)

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


OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Need no key."""

ADMIN_PATHS = frozenset(
    {
        "/api/pull",
        "/flush_cache",
        "/get_server_info",
        "/load_lora_adapter",
        "/server_info",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/replicas/drain",
        "/v1/replicas/start",
        "/v1/unload_lora_adapter",
    }
)
"""Read or change the state of all keys. docs/security.md lists the role of every path."""

ADMIN_PATHS_OF_KEYS = frozenset({"/metrics"})
"""The same where there are keys. Without them, Prometheus may ask from another machine."""

FREE_PATHS = frozenset({"/abort_request", "/v1/cache/release"})
"""Give resources back, so that no limit holds them up."""

_FORWARDING = frozenset(
    {b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip",
     b"cf-connecting-ip", b"fastly-client-ip"}
)  # fmt: skip
_FORWARDING_PREFIXES = (b"x-forwarded", b"x-original-", b"x-envoy-")


NO_LIMITS = KeyLimits()


@dataclass(frozen=True)
class Caller:
    """The client that has sent a request."""

    tenant: Tenant
    is_admin: bool
    limits: KeyLimits = NO_LIMITS
    access: bytes = b""
    """Distinguishes clients where the tenant does not: only the same client may continue a kept
    conversation."""

    def session(self, name: str) -> str:
        """The name of a cache session of this caller's, told apart from those of others; "":
        none."""
        return f"{self.tenant.name}\0{name}" if name and self.tenant.name else name

    @property
    def sees_own_texts(self) -> bool:
        """Whether texts of the cache under its tenant are its own: without keys, all clients are
        one tenant."""
        return self.is_admin or self.tenant.name != ""

    def sees_engine(self, keys_are_declared: bool) -> bool:
        """Whether it may see the counters of all requests together, as ``/metrics`` shows them."""
        return self.is_admin or not keys_are_declared

    def check_model(self, names: list[str]) -> None:
        """Raises RequestError if the caller's key is not for the model that has these names."""
        if self.limits.models is not None and not {*names} & {*self.limits.models}:
            raise RequestError(
                f"This API key is not for {names[0]}; it may use {', '.join(self.limits.models) or 'no model'}.",
                status=403,
                param="model",
                code="model_not_allowed",
            )

    def check_admin(self, deed: str) -> None:
        """Raises RequestError if the caller is not an admin."""
        if not self.is_admin:
            raise RequestError(
                f"{deed} needs the key of an admin. Without keys on the server, it works only from the server's own machine "
                "and not through a proxy (docs/security.md).",
                status=403,
                code="admin_only",
            )


class Keys:
    """The keys in force, and the use that each has made of its limits.

    Args:
        source: where they are read from; by default there are none.
    """

    def __init__(self, source: KeySource | None = None) -> None:
        self._source = source or KeySource()
        self._callers: list[tuple[str, Caller]] = []
        """The digest of each key, and its caller."""
        self._use: dict[str, KeyUse] = {}
        """The use of each key, by its name."""
        self._set(self._source.load())

    @property
    def are_declared(self) -> bool:
        """Whether clients need a key."""
        return bool(self._callers)

    @property
    def count(self) -> int:
        """Number of keys, those for the same name counted once."""
        return len(self._use)

    def reload(self) -> None:
        """Read the keys again; if they are not valid, the old ones stay. Requests in flight go on
        in any case."""
        try:
            keys = self._source.load()
        except ConfigError as error:
            log.error("The API keys stay as they are: %s", error)
            return
        self._set(keys)
        log.info("Read %d API keys.", len(keys))

    def find(self, given: bytes) -> Caller | None:
        """The caller with this key. The time depends only on the number of keys."""
        digest, found = digest_of(given), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def use_of(self, tenant: Tenant) -> KeyUse:
        """The use that a key has made of its limits."""
        return self._use.get(tenant.name) or KeyUse()

    def caller(self, scope: Scope) -> Caller:
        """The caller of a request.

        Raises:
            RequestError: it has no key (401), or that of a user on a path of admins (403).
        """
        path, headers = scope["path"], dict(scope["headers"])
        if path in OPEN_PATHS or asks_for_page(scope):
            return Caller(NO_TENANT, is_admin=False)
        if self.are_declared:
            caller = self.find(_key_in(headers))
            if caller is None:
                raise RequestError(
                    "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                    status=401,
                    code="invalid_api_key",
                )
        else:
            authorization = headers.get(b"authorization", b"")
            caller = Caller(NO_TENANT, is_admin=_is_local(scope), access=authorization)
        if path in ADMIN_PATHS or (self.are_declared and path in ADMIN_PATHS_OF_KEYS):
            caller.check_admin(path)
        return caller

    def begin(self, scope: Scope, caller: Caller) -> KeyUse | None:
        """Hold the caller to its limits while its request runs, until :meth:`KeyUse.end`; None: the
        request is not limited."""
        generates = scope["method"] == "POST" and scope["path"] not in FREE_PATHS
        if not generates and scope["path"] != "/health_generate":
            return None
        use = self.use_of(caller.tenant)
        use.begin(caller.limits)
        return use

    def _set(self, keys: list[ApiKey]) -> None:
        admin = Caller(NO_TENANT, is_admin=True)
        callers = [(digest_of(key), admin) for key in self._source.plain]
        for key in keys:
            caller = _caller(key)
            callers += [(digest, caller) for digest in key.digests]
        self._callers = callers
        names = {caller.tenant.name for _, caller in callers}
        self._use = {name: self._use.get(name, KeyUse()) for name in names}


def _caller(key: ApiKey) -> Caller:
    group, limits = key.cache_group, key.limits
    pinned = limits.max_pinned_fraction
    tenant = Tenant(
        name=key.name,
        cache_namespace=f"key:{key.name}" if group is None else f"group:{group}",
        weight=key.weight,
        max_tokens=limits.max_tokens,
        max_pinned_fraction=1.0 if pinned is None else pinned,
        max_cached_fraction=limits.max_cached_fraction,
    )
    return Caller(tenant, key.role == "admin", limits)


def _key_in(headers: dict[bytes, bytes]) -> bytes:
    """The bearer token or, without one, the ``x-api-key``."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token
    return headers.get(b"x-api-key", b"")


def _is_local(scope: Scope) -> bool:
    """Whether the request comes from this machine, or from this process, and no header says that it
    was forwarded."""
    for name, _ in scope["headers"]:
        if name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES):
            return False
    if scope["client"] is None:
        return scope["server"] is None
    try:
        address = ipaddress.ip_address(scope["client"][0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
