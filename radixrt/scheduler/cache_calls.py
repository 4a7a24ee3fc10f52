"""How does the scheduler answer calls about its cache: pin, release, and show the tree?"""

from collections import deque
from collections.abc import Callable

import msgspec

from radixrt.errors import RequestError
from radixrt.messages.answers import RequestFailed
from radixrt.messages.calls import CacheTreeCall, CallReply, PinTokensCall, ReleaseCacheCall
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.tree_view import Slices, TreeView

CacheCall = PinTokensCall | ReleaseCacheCall | CacheTreeCall


class CacheCalls:
    """Answers calls, at once or, where the answer takes long, piece by piece.

    Args:
        send: takes the replies.
    """

    def __init__(self, scheduler: Scheduler, send: Callable[[CallReply], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._views: deque[tuple[int, Slices]] = deque()

    @property
    def is_working(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._views)

    def take(self, call: CacheCall) -> None:
        if isinstance(call, CacheTreeCall):
            view = TreeView(self._scheduler.kv.tree, call, self._scheduler.clock)
            self._views.append((call.call_id, view.slices()))
            return
        try:
            value = self._pin(call) if isinstance(call, PinTokensCall) else self._release(call)
        except RequestError as error:
            self._send(CallReply(call_id=call.call_id, error=RequestFailed.of(error)))
        else:
            self._send(CallReply(call_id=call.call_id, value=value))

    def work(self) -> None:
        """Go on with an answer for a few milliseconds."""
        if not self._views:
            return
        call_id, slices = self._views[0]
        try:
            next(slices)
            self._views.rotate(-1)
        except StopIteration as end:
            self._views.popleft()
            self._send(
                CallReply(
                    call_id=call_id, value=msgspec.to_builtins(end.value, builtin_types=[bytes])
                )
            )

    def _pin(self, call: PinTokensCall) -> dict[str, object]:
        lease = self._scheduler.kv.leases.pin(
            unpack_ids(call.token_ids), call.cache_salt, call.ttl_s
        )
        return {
            "lease": lease.lease_id,
            "pinned_tokens": lease.num_pages * self._scheduler.limits.page_size,
            "expires_in_s": call.ttl_s,
        }

    def _release(self, call: ReleaseCacheCall) -> dict[str, object]:
        if call.lease:
            lease = self._scheduler.kv.leases.release(call.lease)
            return {"released_tokens": lease.num_pages * self._scheduler.limits.page_size}
        tokens = self._scheduler.release_session(call.session, call.cache_salt)
        return {"released_tokens": tokens}
