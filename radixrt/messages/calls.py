"""What is asked of the engine besides answers? Each call is answered by one :class:`radixrt.messages.replies.CallReply`, by whichever process knows."""

from radixrt.constrained.constraint import Constraint
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message
from radixrt.messages.requests import Prompt


class TokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is a Tokenized."""

    call_id: int
    prompt: Prompt


class DetokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is a Detokenized."""

    call_id: int
    token_ids: PackedIds
    skip_special_tokens: bool = False


class FlushCacheCall(Message, frozen=True):
    """Empty the radix tree. Answered by a CallReply whose value is a CacheFlushed.

    Only what no running request uses is dropped.
    """

    call_id: int


class PinCall(Message, frozen=True, kw_only=True):
    """Keep what the tree holds of a prompt from eviction, for a time: a lease.

    Answered by a CallReply whose value is a LeaseGranted, or whose error says that too much is pinned already.
    """

    call_id: int
    prompt: Prompt
    cache_salt: str = ""
    ttl_s: float


class ReleaseCacheCall(Message, frozen=True, kw_only=True):
    """End a lease, or say that a session has ended: its KV goes first from now on.

    Answered by a CallReply whose value is a CacheReleased; the error of an unknown lease has status 404.
    """

    call_id: int
    lease: str = ""
    session: str = ""
    cache_salt: str = ""
    """Of the session's requests."""


class CacheTreeCall(Message, frozen=True, kw_only=True):
    """An aggregated view of the radix tree. Answered by a CallReply whose value is a CacheTree."""

    call_id: int
    depth: int = 3
    """Levels of nodes shown below each root; what is below them is summed up."""
    children: int = 16
    """Most children shown of a node, those with the most pages below them; the others are summed up."""


class CompileCall(Message, frozen=True, kw_only=True):
    """Compile a constraint ahead of the requests that will use it.

    Answered by a CallReply whose value is a CompileReport.
    """

    call_id: int
    constraint: Constraint


class StatsCall(Message, frozen=True):
    """Answered by a CallReply whose value is a SchedulerStats."""

    call_id: int
    check_invariants: bool = False
    """Also check that every page is accounted for; a violation is the reply's error."""
    malformed_frames: int = 0
    """That the tokenizer process has dropped; the scheduler adds its own."""


class PinTokensCall(Message, frozen=True, kw_only=True):
    """A PinCall whose prompt is tokenized."""

    call_id: int
    token_ids: PackedIds
    cache_salt: str
    ttl_s: float
