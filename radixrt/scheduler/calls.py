"""Answers the calls to the scheduler, at once or, for a view of the tree, piece by piece."""

import logging
from collections import deque
from collections.abc import Callable, Generator
from functools import singledispatchmethod
from typing import Any, NoReturn

from radixrt.base.errors import RequestError, unexpected_error
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import RequestFailed
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.cache_tree import CacheLease, CacheNode
from radixrt.messages.calls import (
    AnySchedulerCall,
    CacheFactsCall,
    CacheMatch,
    CacheNodeCall,
    CacheTreeCall,
    CallReply,
    DrainReplicaCall,
    FlushCacheCall,
    LeaseGranted,
    LoadAdapterCall,
    MatchCall,
    PinCall,
    ReleaseCacheCall,
    StatsCall,
    TenantStatsCall,
    UnloadAdapterCall,
)
from radixrt.messages.ids import TokenIds, pack_ids, unpack_ids
from radixrt.messages.stats import SchedulerStats, TenantStats
from radixrt.scheduler.invariants import InvariantError, check_invariants
from radixrt.scheduler.radix.key_ids import tokens_of
from radixrt.scheduler.radix.view import KnownNodes, Slices, TreeView, idle_seconds
from radixrt.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


LATER = object()
"""Stands for the value of a reply that comes when the workers have done their part."""


class DrainReplica(BaseException):
    """Ends this process, past the guard of each call."""


class Calls:
    """The calls of one tokenizer process. Each has a handler below, found by the type of the call.

    Args:
        keep_drained: tells the supervisor not to start this replica again.
        changed_adapters: called when adapters were loaded or unloaded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[CallReply], None],
        stats: Callable[[], SchedulerStats],
        keep_drained: Callable[[], None],
        changed_adapters: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._stats = stats
        self._keep_drained = keep_drained
        self._changed_adapters = changed_adapters
        self._views: deque[tuple[int, Slices]] = deque()
        self._known = KnownNodes()

    @property
    def is_working(self) -> bool:
        """Whether an answer is unfinished."""
        return bool(self._views)

    def take(self, call: AnySchedulerCall) -> None:
        try:
            value = self._answer(call)
            if value is LATER:
                return
            if isinstance(value, Generator):
                self._views.append((call.call_id, value))
            else:
                self._send(CallReply(call_id=call.call_id, value=value))
        except Exception as error:
            self._fail(call.call_id, error)

    def forget(self) -> None:
        """Drop the unfinished answers, and the nodes of the views."""
        self._views.clear()
        self._known = KnownNodes()

    def work(self) -> None:
        """Continue an unfinished answer for a few milliseconds."""
        if not self._views:
            return
        call_id, slices = self._views[0]
        try:
            next(slices)
            self._views.rotate(-1)
        except StopIteration as end:
            self._views.popleft()
            self._send(CallReply(call_id=call_id, value=end.value))
        except Exception as error:
            self._views.popleft()
            self._fail(call_id, error)

    def _fail(self, call_id: int, error: Exception) -> None:
        """Answer with an error. One that is no fault of the call is logged, and ends the call
        alone."""
        if not isinstance(error, RequestError):
            log.error("A call failed.", exc_info=error)
            error = unexpected_error()
        self._send(CallReply(call_id=call_id, error=RequestFailed.from_error(error)))

    # ------------------------------------------------------------ one call each

    @singledispatchmethod
    def _answer(self, call: AnySchedulerCall) -> Any:
        """The value of the reply, or a generator that returns it."""
        raise TypeError(f"A {type(call).__name__} has no handler.")

    @_answer.register
    def _flush(self, call: FlushCacheCall) -> int:
        return self._scheduler.flush_cache()

    @_answer.register
    def _load_adapter(self, call: LoadAdapterCall) -> Any:
        def done(loaded: AdapterInfo | RequestError) -> None:
            if isinstance(loaded, RequestError):
                self._fail(call.call_id, loaded)
            else:
                self._changed_adapters()
                self._send(CallReply(call_id=call.call_id, value=loaded))

        self._scheduler.adapters.load(call, done)
        return LATER

    @_answer.register
    def _unload_adapter(self, call: UnloadAdapterCall) -> AdapterInfo:
        info = self._scheduler.adapters.unload(call)
        self._changed_adapters()
        return info

    @_answer.register
    def _checked_stats(self, call: StatsCall) -> SchedulerStats:
        if call.check_invariants:
            try:
                check_invariants(self._scheduler)
            except InvariantError as error:
                raise RequestError(f"An invariant is broken: {error}.", status=500) from error
        return self._stats()

    @_answer.register
    def _tenant_stats(self, call: TenantStatsCall) -> TenantStats:
        return self._scheduler.tenant_stats(call.tenant)

    @_answer.register
    def _drain(self, call: DrainReplicaCall) -> NoReturn:
        self._keep_drained()
        self._send(CallReply(call_id=call.call_id, value=True))
        raise DrainReplica

    @_answer.register
    def _tree(self, call: CacheTreeCall) -> Slices:
        kv, clock = self._scheduler.state.kv, self._scheduler.state.clock
        return TreeView(kv.tree, call, clock, self._known, kv.states).slices()

    @_answer.register
    def _facts(self, call: CacheFactsCall) -> CacheFacts:
        facts = self._scheduler.recent_facts.find(call.seq_id)
        if facts is None:
            raise RequestError(
                "The request has no token yet, or too many others came after it: only the last can be explained.",
                status=404,
            )
        return facts

    @_answer.register
    def _node(self, call: CacheNodeCall) -> CacheNode:
        kv, now = self._scheduler.state.kv, self._scheduler.state.clock()
        node = self._known.find(call.node)
        *path, root = node.path()
        return CacheNode(
            root=kv.tree.root_of(root),
            token_ids=pack_ids(
                tokens_of(unpack_ids(b"".join(above.edge for above in reversed(path))))
            ),
            num_tokens=node.num_pages * kv.page_size,
            age_s=max(0.0, now - node.created * 1e-9),
            idle_s=idle_seconds(node, now),
            uses=node.uses,
            running=node.lock_count - node.lease_count,
            leases=[
                CacheLease(
                    lease=lease.lease_id, tenant=lease.tenant, expires_in_s=lease.expires - now
                )
                for lease in kv.leases.all()
                if node.lease_count and node in lease.node.path()
            ],
        )

    @_answer.register
    def _matches(self, call: MatchCall) -> list[CacheMatch]:
        return [self._match(unpack_ids(one), call.root) for one in call.token_ids]

    def _match(self, tokens: TokenIds, root: CacheRoot) -> CacheMatch:
        kv = self._scheduler.state.kv
        found = kv.tree.match(*self._scheduler.adapters.place_in_tree(tokens, root))
        usable = kv.usable_tokens(found)
        return CacheMatch(prompt_tokens=len(tokens), cached_tokens=usable)

    @_answer.register
    def _pin(self, call: PinCall) -> LeaseGranted:
        tokens = unpack_ids(call.token_ids)
        lease = self._scheduler.state.kv.pin(
            *self._scheduler.adapters.place_in_tree(tokens, call.root),
            call.ttl_s,
            call.lease,
            call.tenant,
        )
        return LeaseGranted(
            lease=lease.lease_id,
            pinned_tokens=lease.num_pages * self._scheduler.state.limits.page_size,
            expires_in_s=call.ttl_s,
        )

    @_answer.register
    def _release(self, call: ReleaseCacheCall) -> int:
        if call.lease:
            lease = self._scheduler.state.kv.leases.release(call.lease, call.tenant)
            return lease.num_pages * self._scheduler.state.limits.page_size
        return self._scheduler.release_session(call.session, call.root)
