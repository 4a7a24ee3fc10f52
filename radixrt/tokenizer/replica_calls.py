"""Sends the calls about caches and counters to all replicas, or to the one that they concern, and merges the replies.

The ids of nodes, which a replica gives to the nodes of its tree, are multiplied by the number of replicas, plus the number of the
replica, so a node names its owner.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.messages.answers import RequestFailed
from radixrt.messages.calls import (
    CacheNodeCall,
    CacheTreeCall,
    DrainReplicaCall,
    FlushCacheCall,
    MatchTokensCall,
    PinTokensCall,
    ReleaseCacheCall,
    SchedulerCall,
    StatsCall,
    TenantStatsCall,
)
from radixrt.messages.replies import CallReply
from radixrt.tokenizer.schedulers import SchedulerLink, Schedulers

Value = Any
"""Of a reply, as builtins."""

_LOST = RequestFailed.of(
    RequestError(
        "The replica was restarted before it answered; ask again.", status=503, retry_after_s=2
    )
)


_UNKNOWN = RequestFailed.of(RequestError("There is no such replica.", status=404, param="replica"))
_LAST = RequestFailed.of(
    RequestError(
        "No other replica runs, to which the answers could go; start one first.", status=409
    )
)


_Order = tuple[SchedulerLink, SchedulerCall]
"""A call for one replica."""


@dataclass(eq=False)
class _Open:
    """A call without replies of all replicas that have it."""

    call: SchedulerCall
    waiting: set[SchedulerLink]
    values: dict[int, Value] = field(default_factory=dict)
    """By replica."""
    errors: list[RequestFailed] = field(default_factory=list)


class ReplicaCalls:
    """The calls to several replicas.

    Args:
        num_replicas: the most that may live at a time.
        pass_on: takes the merged reply.
    """

    def __init__(
        self, schedulers: Schedulers, num_replicas: int, pass_on: Callable[[CallReply], None]
    ) -> None:
        self._schedulers = schedulers
        self._num_replicas = num_replicas
        self._pass_on = pass_on
        self._open: dict[int, _Open] = {}
        self._leases: dict[str, tuple[int, float]] = {}
        """Replica of each lease, and the time at which it expires."""

    def send(self, call: SchedulerCall) -> None:
        """Send a call to the replicas that it concerns."""
        orders = self._orders(call)
        if (error := self._refusal(call, orders)) is not None:
            self._pass_on(CallReply(call_id=call.call_id, error=error))
            return
        self._open[call.call_id] = _Open(call, {link for link, _ in orders})
        for link, order in orders:
            link.send(order)

    def absorb(self, link: SchedulerLink, reply: CallReply) -> None:
        """Take the reply of one replica."""
        opened = self._open.get(reply.call_id)
        if opened is None:
            return
        opened.waiting.discard(link)
        if reply.error is not None:
            opened.errors.append(reply.error)
        else:
            opened.values[link.replica] = reply.value
        self._close_complete(reply.call_id, opened)

    def lose(self, link: SchedulerLink) -> list[str]:
        """A replica has ended: do not wait for its replies; returns its leases."""
        for call_id, opened in list(self._open.items()):
            if link in opened.waiting:
                opened.waiting.discard(link)
                self._close_complete(call_id, opened)
        now = time.monotonic()
        lost = [lease for lease, (replica, _) in self._leases.items() if replica == link.replica]
        return [lease for lease in lost if self._leases.pop(lease)[1] > now]

    def _refusal(self, call: SchedulerCall, orders: list[_Order]) -> RequestFailed | None:
        if isinstance(call, DrainReplicaCall):
            if call.replica >= self._num_replicas:
                return _UNKNOWN
            draining = sum(isinstance(o.call, DrainReplicaCall) for o in self._open.values())
            if orders and len(self._schedulers.links) - draining < 2:
                return _LAST
        return None if orders else _LOST

    def _orders(self, call: SchedulerCall) -> list[_Order]:
        links = self._schedulers.links
        match call:
            case CacheNodeCall():
                node, replica = divmod(call.node, self._num_replicas)
                return [(links[replica], replace(call, node=node))] if replica in links else []
            case CacheTreeCall() if call.below is not None:
                below, replica = divmod(call.below, self._num_replicas)
                return [(links[replica], replace(call, below=below))] if replica in links else []
            case DrainReplicaCall():
                return [(links[call.replica], call)] if call.replica in links else []
            case PinTokensCall() if links:
                return [(self._schedulers.owner(call.token_ids, call.cache_salt), call)]
            case StatsCall():
                others = replace(call, malformed_frames=0)  # those of this process count once
                calls = [call, *[others] * len(links)]
                return list(zip(links.values(), calls, strict=False))
        return [(link, call) for link in links.values()]

    def _close_complete(self, call_id: int, opened: _Open) -> None:
        if opened.waiting:
            return
        del self._open[call_id]
        if not opened.values or (opened.errors and isinstance(opened.call, StatsCall)):
            error = opened.errors[0] if opened.errors else _LOST
            self._pass_on(CallReply(call_id=call_id, error=error))
            return
        self._note_lease(opened)
        self._pass_on(CallReply(call_id=call_id, value=self._merged(opened)))

    def _note_lease(self, opened: _Open) -> None:
        match opened.call:
            case PinTokensCall():
                now = time.monotonic()
                if len(self._leases) >= 1024:
                    self._leases = {n: one for n, one in self._leases.items() if one[1] > now}
                for replica, granted in opened.values.items():
                    self._leases[granted["lease"]] = (replica, now + opened.call.ttl_s)
            case ReleaseCacheCall():
                self._leases.pop(opened.call.lease, None)

    def _merged(self, opened: _Open) -> Value:
        values = opened.values
        match opened.call:
            case CacheTreeCall():
                return merged_trees(values, self._num_replicas)
            case FlushCacheCall() | ReleaseCacheCall():
                return sum(values.values())
            case MatchTokensCall():
                of_prompts = zip(*values.values(), strict=True)
                return [max(found, key=itemgetter("cached_tokens")) for found in of_prompts]
            case StatsCall():
                by_replica = {str(replica): values[replica] for replica in sorted(values)}
                return added(list(values.values())) | {"replicas": by_replica}
            case TenantStatsCall():
                total = added(list(values.values()))
                rate = (
                    total["cached_tokens"] / total["prompt_tokens"]
                    if total["prompt_tokens"]
                    else 0.0
                )
                page_size = next(iter(values.values()))["page_size"]
                return total | {"page_size": page_size, "hit_rate": rate}
        return next(iter(values.values()))


def added(values: list[Value]) -> Value:
    """Equal structures with their numbers added. Lists of bounds stay as they are.

    >>> added([{"steps": 1, "time": {"bounds": [0.5], "counts": [1, 0]}}, {"steps": 2, "time": {"bounds": [0.5], "counts": [3, 4]}}])
    {'steps': 3, 'time': {'bounds': [0.5], 'counts': [4, 4]}}
    """
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {
            key: first[key]
            if key == "bounds"
            else added([value[key] for value in values if key in value])
            for key in keys
        }
    if isinstance(first, list):
        return [added(list(items)) for items in zip(*values, strict=True)]
    return sum(values)


def merged_trees(trees: dict[int, Value], num_replicas: int) -> Value:
    """One :class:`radixrt.messages.cache_tree.CacheTree` of those of several replicas, all as builtins."""
    namespaces, above = [], []
    for replica, tree in trees.items():
        for node in _nodes(tree):
            node["node"] = node["node"] * num_replicas + replica
        namespaces += [namespace | {"replica": replica} for namespace in tree["namespaces"]]
        above += tree["above"]
    namespaces.sort(key=lambda namespace: -namespace["total_tokens"])
    return {
        "page_size": next(iter(trees.values()))["page_size"],
        "total_tokens": sum(tree["total_tokens"] for tree in trees.values()),
        "total_nodes": sum(tree["total_nodes"] for tree in trees.values()),
        "namespaces": namespaces,
        "above": above,
    }


def _nodes(tree: Value) -> list[Value]:
    found, pending = [], [*tree["above"]]
    for namespace in tree["namespaces"]:
        pending += namespace["children"]
    while pending:
        node = pending.pop()
        found.append(node)
        pending += node["children"]
    return found
