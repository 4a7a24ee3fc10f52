"""Sends calls to the schedulers of all replicas, or to the one that they concern, and merges the
replies."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.messages.calls import (
    AnySchedulerCall,
    DrainReplicaCall,
    PinTokensCall,
    ReleaseCacheCall,
)
from radixrt.messages.ids import PackedIds
from radixrt.messages.replies import CallReply
from radixrt.tokenizer.schedulers import SchedulerLink, Schedulers

_Order = tuple[SchedulerLink, AnySchedulerCall]
"""A call for one replica."""


@dataclass(eq=False)
class _Open:
    """A call without replies of all replicas that have it."""

    call: AnySchedulerCall
    waiting: set[SchedulerLink]
    values: dict[int, Any] = field(default_factory=dict)
    """The values of replies, as builtins, by replica."""
    errors: list[RequestError] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self, link: SchedulerLink) -> None:
        """Do not wait for a replica any more."""
        self.waiting.discard(link)
        if not self.waiting:
            self.complete.set()


class ReplicaCalls:
    """The calls to the schedulers.

    Args:
        num_replicas: the most that may live at a time.
        is_routed: False: there is one scheduler, whose replies are handed on as they are.
    """

    def __init__(self, schedulers: Schedulers, num_replicas: int, is_routed: bool) -> None:
        self._schedulers = schedulers
        self._is_routed = is_routed
        self.num_replicas = num_replicas
        self._open: dict[int, _Open] = {}
        self._ids = itertools.count()
        self._leases: dict[str, tuple[int, float]] = {}
        """Replica of each lease, and the time at which it expires."""

    async def ask(self, call: AnySchedulerCall) -> Any:
        """Send a call to the replicas that it concerns; returns the value of the merged reply, as
        builtins.

        Raises:
            RequestError: the reply is an error, or there is no such replica.
        """
        orders = self._orders(call)
        if isinstance(call, DrainReplicaCall):
            self._check_drain(call, orders)
        call_id = next(self._ids)
        opened = self._open[call_id] = _Open(call, {link for link, _ in orders})
        try:
            for link, order in orders:
                link.send(replace(order, call_id=call_id))
            if orders:
                await opened.complete.wait()
        finally:
            del self._open[call_id]
        if opened.errors and (call.needs_all or not opened.values):
            raise opened.errors[0]
        if not opened.values:
            raise RequestError(
                "The replica was restarted before it answered; ask again.",
                status=503,
                retry_after_s=2,
            )
        if not self._is_routed:
            return opened.values[0]
        return call.merge(opened.values, self.num_replicas)

    def owner(self, token_ids: PackedIds, cache_salt: str) -> int:
        """The replica that has most of a prompt cached."""
        return self._schedulers.owner(token_ids, cache_salt).replica

    def absorb(self, link: SchedulerLink, reply: CallReply) -> None:
        """Take the reply of one replica."""
        opened = self._open.get(reply.call_id)
        if opened is None:
            return
        if reply.error is not None:
            opened.errors.append(reply.error.as_error())
        else:
            opened.values[link.replica] = reply.value
            self._note_lease(opened.call, link, reply.value)
        opened.leave(link)

    def lose(self, link: SchedulerLink) -> list[str]:
        """A replica has ended: do not wait for its replies; returns its leases."""
        for opened in self._open.values():
            opened.leave(link)
        now = time.monotonic()
        lost = [lease for lease, (replica, _) in self._leases.items() if replica == link.replica]
        return [lease for lease in lost if self._leases.pop(lease)[1] > now]

    def _check_drain(self, call: DrainReplicaCall, orders: list[_Order]) -> None:
        """Raises:
        RequestError: there is no such replica, or no other one runs.
        """
        if call.replica >= self.num_replicas:
            raise RequestError("There is no such replica.", status=404, param="replica")
        draining = sum(isinstance(opened.call, DrainReplicaCall) for opened in self._open.values())
        if orders and len(self._schedulers.links) - draining < 2:
            raise RequestError(
                "No other replica runs, to which the answers could go; start one first.", status=409
            )

    def _orders(self, call: AnySchedulerCall) -> list[_Order]:
        links = self._schedulers.links
        if not links or (found := call.receiver(self)) is None:
            return [(link, call) for link in links.values()]
        replica, order = found
        return [(links[replica], order)] if replica in links else []

    def _note_lease(self, call: AnySchedulerCall, link: SchedulerLink, value: Any) -> None:
        match call:
            case PinTokensCall():
                now = time.monotonic()
                if len(self._leases) >= 1024:
                    self._leases = {n: one for n, one in self._leases.items() if one[1] > now}
                self._leases[value["lease"]] = (link.replica, now + call.ttl_s)
            case ReleaseCacheCall():
                self._leases.pop(call.lease, None)
