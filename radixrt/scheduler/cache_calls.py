"""Answers the calls about the cache: pin, release, and show the tree."""

from collections import deque
from collections.abc import Callable

from radixrt.base.errors import RequestError
from radixrt.messages.answers import RequestFailed
from radixrt.messages.cache_tree import CacheLease, CacheNode
from radixrt.messages.calls import CacheNodeCall, CacheTreeCall, PinTokensCall, ReleaseCacheCall
from radixrt.messages.ids import unpack_ids
from radixrt.messages.replies import CallReply, LeaseGranted
from radixrt.scheduler.radix.view import KnownNodes, Slices, TreeView, idle_seconds
from radixrt.scheduler.scheduler import Scheduler

CacheCall = PinTokensCall | ReleaseCacheCall | CacheTreeCall | CacheNodeCall


class CacheCalls:
    """Answers calls, at once or, for a view of the tree, piece by piece.

    Args:
        send: takes the replies.
    """

    def __init__(self, scheduler: Scheduler, send: Callable[[CallReply], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._views: deque[tuple[int, Slices]] = deque()
        self._known = KnownNodes()

    @property
    def is_working(self) -> bool:
        """Whether an answer is unfinished."""
        return bool(self._views)

    def take(self, call: CacheCall) -> None:
        if isinstance(call, CacheTreeCall):
            view = TreeView(self._scheduler.kv.tree, call, self._scheduler.clock, self._known)
            self._views.append((call.call_id, view.slices()))
            return
        try:
            reply = CallReply(call_id=call.call_id, value=self._value(call))
        except RequestError as error:
            reply = CallReply(call_id=call.call_id, error=RequestFailed.of(error))
        self._send(reply)

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

    def _value(self, call: PinTokensCall | ReleaseCacheCall | CacheNodeCall) -> object:
        match call:
            case PinTokensCall():
                return self._pin(call)
            case ReleaseCacheCall():
                return self._release(call)
            case CacheNodeCall():
                return self._node(call)

    def _node(self, call: CacheNodeCall) -> CacheNode:
        kv, now = self._scheduler.kv, self._scheduler.clock()
        node = self._known.find(call.node)
        *path, root = node.path()
        return CacheNode(
            cache_salt=kv.tree.salt_of(root),
            token_ids=b"".join(above.edge for above in reversed(path)),
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

    def _pin(self, call: PinTokensCall) -> LeaseGranted:
        tokens = unpack_ids(call.token_ids)
        lease = self._scheduler.kv.leases.pin(
            tokens, call.cache_salt, call.ttl_s, call.lease, call.tenant
        )
        return LeaseGranted(
            lease=lease.lease_id,
            pinned_tokens=lease.num_pages * self._scheduler.limits.page_size,
            expires_in_s=call.ttl_s,
        )

    def _release(self, call: ReleaseCacheCall) -> int:
        if call.lease:
            lease = self._scheduler.kv.leases.release(call.lease, call.tenant)
            tokens = lease.num_pages * self._scheduler.limits.page_size
        else:
            tokens = self._scheduler.release_session(call.session, call.cache_salt)
        return tokens
