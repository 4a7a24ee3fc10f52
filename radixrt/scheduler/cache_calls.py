"""Answers the calls about the cache: pin, release, and show the tree."""

import logging
from collections import deque
from collections.abc import Callable

from radixrt.base.errors import RequestError, unexpected_error
from radixrt.messages.answers import RequestFailed
from radixrt.messages.cache_tree import CacheLease, CacheNode
from radixrt.messages.calls import (
    CacheFactsCall,
    CacheNodeCall,
    CacheTreeCall,
    MatchTokensCall,
    PinTokensCall,
    ReleaseCacheCall,
)
from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.messages.replies import CacheMatch, CallReply, LeaseGranted
from radixrt.scheduler.radix.view import KnownNodes, Slices, TreeView, idle_seconds
from radixrt.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

CacheCall = (
    MatchTokensCall
    | PinTokensCall
    | ReleaseCacheCall
    | CacheTreeCall
    | CacheNodeCall
    | CacheFactsCall
)


NOT_EXPLAINED = "The request has no token yet, or too many others came after it: only the last can be explained."


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
        try:
            if isinstance(call, CacheTreeCall):
                view = TreeView(self._scheduler.kv.tree, call, self._scheduler.clock, self._known)
                self._views.append((call.call_id, view.slices()))
            else:
                self._send(CallReply(call_id=call.call_id, value=self._value(call)))
        except Exception as error:
            self._fail(call.call_id, error)

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
        """Answer with an error. One that is no fault of the call is logged, and ends the call alone."""
        if not isinstance(error, RequestError):
            log.error("A call about the cache failed.", exc_info=error)
            error = unexpected_error()
        self._send(CallReply(call_id=call_id, error=RequestFailed.of(error)))

    def _value(
        self,
        call: MatchTokensCall | PinTokensCall | ReleaseCacheCall | CacheNodeCall | CacheFactsCall,
    ) -> object:
        match call:
            case MatchTokensCall():
                return [self._match(unpack_ids(one), call.cache_salt) for one in call.prompts]
            case PinTokensCall():
                return self._pin(call)
            case ReleaseCacheCall():
                return self._release(call)
            case CacheNodeCall():
                return self._node(call)
        facts = self._scheduler.recent_facts.find(call.seq_id)
        if facts is None:
            raise RequestError(NOT_EXPLAINED, status=404)
        return facts

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

    def _match(self, tokens: TokenIds, salt: str) -> CacheMatch:
        kv = self._scheduler.kv
        found = kv.tree.match(tokens, salt)
        pages = 0 if found is None else found.num_pages
        return CacheMatch(prompt_tokens=len(tokens), cached_tokens=pages * kv.page_size)

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
