"""The leases of a client, which are taken again when an engine dies and its radix tree with it.

The client keeps the prompt of each lease. After a takeover it computes these prompts once more, in
the background and behind the open requests, and pins them under the same ids for the rest of their
time. A lease that can't be taken again is lost, and its release says so.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.messages.calls import AnyCall, LeaseGranted, PinCall, ReleaseCacheCall
from radixrt.messages.requests import NO_TENANT, GenerateRequest, RequestOptions, Tenant

MAX_PROMPT_BYTES = 64 << 20
"""Most bytes of all kept prompts. Leases beyond it are lost when the engine dies."""

MIN_PURGE = 64
"""Kept leases before those that have expired are forgotten."""

MIN_S = 1.0
"""A lease that expires sooner is not taken again."""


@dataclass(eq=False)
class _Lease:
    """One lease."""

    call: PinCall | None
    """None: the prompt is too large to be kept."""
    num_bytes: int
    tenant: Tenant
    expires: float
    """Time on the clock at which it expires."""
    lost: str = ""
    """The reason for its loss."""


class ClientLeases:
    """The leases of one client.

    Args:
        compute: runs a request without an answer, so that its prompt is in the tree.
        ask: sends a call to the engine and returns its reply.
        send: sends a call whose reply nobody needs.
    """

    def __init__(
        self,
        compute: Callable[[GenerateRequest], Awaitable[object]],
        ask: Callable[[AnyCall], Awaitable[Any]],
        send: Callable[[AnyCall], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compute = compute
        self._ask = ask
        self._send = send
        self._clock = clock
        self._by_id: dict[str, _Lease] = {}
        self._num_bytes = 0
        self._purge_at = MIN_PURGE
        self._restoring: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Event] = {}
        """Leases that are not taken again yet."""

    def __len__(self) -> int:
        """Number of leases; those that have expired may be among them."""
        return len(self._by_id)

    async def pin(self, call: PinCall) -> LeaseGranted:
        """Take a lease. A caller that is cancelled meanwhile leaves none behind."""
        pinning = asyncio.ensure_future(self._ask(call))
        try:
            granted: LeaseGranted = await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(partial(self._give_back, call.tenant))
            raise
        self.add(granted.lease, call)
        return granted

    def _give_back(self, tenant: Tenant, pinning: asyncio.Future[LeaseGranted]) -> None:
        """Release a lease whose caller was cancelled."""
        if not pinning.cancelled() and pinning.exception() is None:
            with contextlib.suppress(EngineDiedError):
                self._send(ReleaseCacheCall(lease=pinning.result().lease, tenant=tenant))

    async def release(self, call: ReleaseCacheCall) -> int:
        """End a lease, or a session.

        Raises:
            RequestError: the lease was lost with an engine, or is unknown to this one.
        """
        if call.lease:
            await self.before_release(call.lease, call.tenant)
        released: int = await self._ask(call)
        return released

    def add(self, lease: str, call: PinCall) -> None:
        """A lease was granted."""
        num_bytes = len(msgspec.msgpack.encode(call.prompt))
        if len(self._by_id) >= self._purge_at or self._num_bytes + num_bytes > MAX_PROMPT_BYTES:
            self._purge()
        if self._num_bytes + num_bytes > MAX_PROMPT_BYTES:
            held = _Lease(None, 0, call.tenant, self._clock() + call.ttl_s)
        else:
            held = _Lease(call, num_bytes, call.tenant, self._clock() + call.ttl_s)
        self._by_id[lease] = held
        self._num_bytes += held.num_bytes

    async def before_release(self, lease: str, tenant: Tenant = NO_TENANT) -> None:
        """Forget a lease that is about to be released; one that is being taken again is waited for.

        Raises:
            RequestError: it was lost with an engine.
        """
        if (pending := self._pending.get(lease)) is not None:
            await pending.wait()
        held = self._by_id.get(lease)
        if held is None or held.tenant.name != tenant.name:
            return
        self._forget(lease)
        if held.lost:
            raise RequestError(
                f"The lease was lost when the engine was restarted: {held.lost}",
                status=404,
                code="lease_lost",
            )

    def restore(self, lost: Collection[str] | None = None) -> None:
        """An engine has died and another one is ready: take the leases again.

        Args:
            lost: those of a dead replica; None: all.
        """
        again = self._by_id.keys() if lost is None else self._by_id.keys() & set(lost)
        if not again:
            return
        self.close()
        for lease in again:
            self._pending.setdefault(lease, asyncio.Event())
        self._restoring = asyncio.get_running_loop().create_task(self._restore())

    def close(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()

    async def _restore(self) -> None:
        for lease in list(self._pending):
            if (held := self._by_id.get(lease)) is not None and not held.lost:
                try:
                    await self._take_again(lease, held)
                except Exception as error:  # the other leases are taken again
                    held.lost = str(error)
                    self._drop_prompt(held)
            self._pending.pop(lease).set()

    async def _take_again(self, lease: str, held: _Lease) -> None:
        """Raises RequestError if it is lost."""
        if held.expires - self._clock() < MIN_S:
            return
        if (call := held.call) is None:
            raise RequestError("The prompt was too large to be kept.")
        options = RequestOptions(sampling=PREFILL_ONLY, root=call.root, tenant=call.tenant)
        await self._compute(
            GenerateRequest(request_id=f"lease-{lease}", prompt=call.prompt, options=options)
        )
        left_s = max(MIN_S, held.expires - self._clock())
        await self._ask(replace(call, ttl_s=left_s, lease=lease))

    def _forget(self, lease: str) -> _Lease | None:
        held = self._by_id.pop(lease, None)
        if held is not None:
            self._drop_prompt(held)
        return held

    def _drop_prompt(self, held: _Lease) -> None:
        self._num_bytes -= held.num_bytes
        held.call, held.num_bytes = None, 0

    def _purge(self) -> None:
        now = self._clock()
        for lease in [lease for lease, held in self._by_id.items() if held.expires < now]:
            self._forget(lease)
        self._purge_at = max(MIN_PURGE, 2 * len(self._by_id))
