"""Calls: requests to the engine that want one reply and no answer of the model.

Each gets one :class:`radixrt.messages.replies.CallReply`, from the tokenizer process or from the scheduler.
"""

from radixrt.constrained.constraint import Constraint
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message
from radixrt.messages.requests import NO_TENANT, Prompt, Tenant


class TokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is a Tokenized."""

    call_id: int
    prompt: Prompt
    tenant: Tenant
    cache_salt: str
    """Of the requests whose kept answers the prompt may repeat."""


class DetokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is the text."""

    call_id: int
    token_ids: PackedIds
    skip_special_tokens: bool = False
    tenant: Tenant = NO_TENANT


class FlushCacheCall(Message, frozen=True):
    """Empty the radix tree. Answered by a CallReply whose value is the number of pages freed.

    Only pages that no running request uses are dropped.
    """

    call_id: int


class PinCall(Message, frozen=True, kw_only=True):
    """Keep a prompt's KV in the tree from eviction for ``ttl_s`` seconds: a lease.

    Answered by a CallReply whose value is a LeaseGranted, or whose error is that too much is pinned already.
    """

    call_id: int
    prompt: Prompt
    cache_salt: str
    ttl_s: float
    lease: str = ""
    """The id of the lease, which a dead engine had granted; empty: a new one."""
    tenant: Tenant = NO_TENANT


class ReleaseCacheCall(Message, frozen=True, kw_only=True):
    """End a lease, or a session, whose KV is then evicted first.

    Answered by a CallReply whose value is the number of tokens of the lease or the session; the error of an unknown lease,
    or of another tenant's, has status 404.
    """

    call_id: int
    tenant: Tenant = NO_TENANT
    lease: str = ""
    session: str = ""
    cache_salt: str = ""
    """Of the session's requests."""


class CacheTreeCall(Message, frozen=True, kw_only=True):
    """An aggregated view of the radix tree. Answered by a CallReply whose value is a CacheTree."""

    call_id: int
    depth: int = 3
    """Levels of nodes shown below each root; deeper nodes are only counted."""
    children: int = 16
    """Most children shown of a node, those with the most pages below them; the others are only counted."""
    namespace: str | None = None
    """Of the cache salts whose part of the tree is shown; None: all."""
    with_texts: bool = True
    """Show the texts of prompts, unless the server hides them from everybody."""
    most: int = 2000
    """Most nodes shown: those with the most pages in and below them."""
    below: int | None = None
    """The node whose part of the tree is shown, by the id of an earlier view; if it has left the tree, the whole is shown."""


class CacheNodeCall(Message, frozen=True):
    """One node of an earlier view. Answered by a CallReply whose value is a CacheNode, or whose error is that it has left the tree."""

    call_id: int
    node: int


class CompileCall(Message, frozen=True, kw_only=True):
    """Compile a constraint ahead of the requests that will use it.

    Answered by a CallReply whose value is an :class:`radixrt.constrained.advice.Advice`.
    """

    call_id: int
    constraint: Constraint
    tenant: Tenant = NO_TENANT


class StatsCall(Message, frozen=True):
    """Answered by a CallReply whose value is a SchedulerStats."""

    call_id: int
    check_invariants: bool = False
    """Also check that every page is accounted for; a violation is the reply's error."""
    malformed_frames: int = 0
    """Frames dropped by the tokenizer process; the scheduler adds its own."""


class TenantStatsCall(Message, frozen=True):
    """Answered by a CallReply whose value is a TenantStats."""

    call_id: int
    tenant: Tenant


class DrainReplicaCall(Message, frozen=True):
    """Let a replica go: its requests go on in others. Answered by a CallReply whose value is true."""

    call_id: int
    replica: int


class ExplainCacheCall(Message, frozen=True, kw_only=True):
    """Explain the cache misses of one of the tenant's last requests. Answered by a CallReply whose value is a CacheExplanation, or
    whose error is that the request is unknown."""

    call_id: int
    request_id: str
    tenant: Tenant = NO_TENANT
    with_texts: bool = False
    """As ``CacheHints.explain_texts``."""


class CacheFactsCall(Message, frozen=True):
    """An ExplainCacheCall whose sequence is known. Answered by a CallReply whose value is its CacheFacts."""

    call_id: int
    seq_id: int


class MatchCall(Message, frozen=True, kw_only=True):
    """Find how much of prompts the cache holds. Answered by a CallReply whose value is a list of CacheMatch."""

    call_id: int
    prompts: list[Prompt]
    cache_salt: str
    tenant: Tenant = NO_TENANT


class MatchTokensCall(Message, frozen=True, kw_only=True):
    """A MatchCall whose prompts are tokenized."""

    call_id: int
    prompts: list[PackedIds]
    cache_salt: str


class PinTokensCall(Message, frozen=True, kw_only=True):
    """A PinCall whose prompt is tokenized."""

    call_id: int
    token_ids: PackedIds
    cache_salt: str
    ttl_s: float
    lease: str = ""
    tenant: Tenant = NO_TENANT


Call = (
    TokenizeCall
    | DetokenizeCall
    | CompileCall
    | FlushCacheCall
    | PinCall
    | MatchCall
    | ReleaseCacheCall
    | CacheTreeCall
    | CacheNodeCall
    | StatsCall
    | TenantStatsCall
    | DrainReplicaCall
    | ExplainCacheCall
)
"""A call of the api, which the tokenizer process answers or hands on."""

SchedulerCall = (
    FlushCacheCall
    | MatchTokensCall
    | PinTokensCall
    | ReleaseCacheCall
    | CacheTreeCall
    | CacheFactsCall
    | CacheNodeCall
    | StatsCall
    | TenantStatsCall
    | DrainReplicaCall
)
"""A call that the scheduler answers."""
