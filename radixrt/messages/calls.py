"""Calls: requests to the engine that want one reply and no answer of the model.

Each call is declared once, here: its fields, the type of its reply (``Call[Reply]``), and the
process that answers it. A :class:`Call` is answered by the tokenizer process
(``tokenizer/calls.py``), a :class:`SchedulerCall` by the schedulers (``scheduler/calls.py``). Each
process finds the handler of a call by its type.
"""

from functools import reduce
from operator import itemgetter, or_
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    get_args,
)

import msgspec
from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.constrained.advice import Advice
from radixrt.constrained.constraint import Constraint
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import RequestFailed
from radixrt.messages.cache_explanation import CacheExplanation, CacheFacts
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.cache_tree import CacheNode
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message
from radixrt.messages.requests import NO_TENANT, Prompt, Tenant, TokenPrompt
from radixrt.messages.stats import SchedulerStats, TenantStats


class CallReply(Message, frozen=True, kw_only=True):
    """Answers a call: a value or an error."""

    call_id: int
    value: Any = None
    """The value as the call documents it; a struct is received as builtins."""
    error: RequestFailed | None = None


class Tokenized(msgspec.Struct, frozen=True):
    token_ids: list[int]
    prompt: str
    """The prompt as text."""


class CacheMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that the cache holds."""

    prompt_tokens: int
    cached_tokens: int
    """Leading tokens of the prompt, in whole pages."""


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: a prompt's KV stays until it expires or is released."""

    lease: str
    """Its id, for release."""
    pinned_tokens: int
    """Leading tokens of the prompt that it covers."""
    expires_in_s: float


Value = Any
"""The value of a reply, as builtins."""


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


def merged_tenant_stats(values: list[Value]) -> Value:
    """One :class:`radixrt.messages.stats.TenantStats` of those of several replicas."""
    total = added(values)
    rate = total["cached_tokens"] / max(1, total["prompt_tokens"])
    return total | {"page_size": values[0]["page_size"], "hit_rate": rate}


def merged_trees(trees: dict[int, Value], num_replicas: int) -> Value:
    """One :class:`radixrt.messages.cache_tree.CacheTree` of those of several replicas."""
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


Reply = TypeVar("Reply")


class Call(Message, Generic[Reply], frozen=True, kw_only=True):
    """A call that the tokenizer process answers with a ``Reply``, or with the error of a
    RequestError."""

    call_id: int = 0
    """The number of the call on its link, set by its sender."""

    @classmethod
    def reply_type(cls) -> type[Reply]:
        """The type to which the value of the :class:`radixrt.messages.calls.CallReply` is
        converted.

        >>> TokenizeCall.reply_type().__name__
        'Tokenized'
        """
        reply: type[Reply] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return reply


class Replicas(Protocol):
    """The replicas of an engine, among which a call finds its receiver."""

    @property
    def num_replicas(self) -> int:
        """The most that may live at a time."""

    def owner(self, token_ids: PackedIds, root: CacheRoot) -> int:
        """The replica that has most of a prompt cached."""


class SchedulerCall(Call[Reply], frozen=True, kw_only=True):
    """A call that the schedulers answer: of all replicas, whose replies are merged, or of the one
    that it concerns."""

    needs_all: ClassVar[bool] = False
    """True: an error of one replica is the error of the call. False: only the errors of all are."""

    def receiver(self, replicas: Replicas) -> tuple[int, Self] | None:
        """The one replica that the call concerns, and the call in its terms; None: all replicas get
        it."""
        return None

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        """The one value of the values of several replicas, all as builtins. The default is for
        equal ones."""
        return next(iter(values.values()))


class TokenizeCall(Call[Tokenized], frozen=True):
    """A prompt, also one some times longer than the context, as token ids and as text."""

    prompt: Prompt
    tenant: Tenant
    root: CacheRoot
    """The root of the requests whose kept answers the prompt may repeat: they are the tokens that
    were generated."""


class DetokenizeCall(Call[str], frozen=True):
    """The text of tokens."""

    token_ids: PackedIds
    skip_special_tokens: bool = False
    tenant: Tenant = NO_TENANT


class CompileCall(Call[Advice], frozen=True):
    """Compile a constraint ahead of the requests that will use it; one that can't be enforced is
    not ``ok``."""

    constraint: Constraint
    tenant: Tenant = NO_TENANT


class ExplainCacheCall(Call[list[CacheExplanation]], frozen=True, kw_only=True):
    """Explain the cache misses of one of the tenant's last requests, which it is an error not to
    know, or of those of a session, the oldest first, but for requests without a token so far."""

    request_id: str = ""
    session: str = ""
    """As ``CacheHints.session`` has it."""
    tenant: Tenant = NO_TENANT
    with_texts: bool = False
    """The same as ``CacheHints.explain_texts``."""


class LoadAdapterCall(SchedulerCall[AdapterInfo], frozen=True, kw_only=True):
    """Load a LoRA adapter from a folder, under a name."""

    needs_all = True

    name: str
    path: str
    replaces: bool = False
    """The name may be that of another adapter, which new requests do not get any more."""

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        """Raises RequestError if the replicas have read different bytes."""
        first, *others = values.values()
        if any(other["digest"] != first["digest"] for other in others):
            raise RequestError(
                "The adapter was replaced while the replicas of --dp read it; load it again.",
                param="lora_path",
            )
        return first


class UnloadAdapterCall(SchedulerCall[AdapterInfo], frozen=True, kw_only=True):
    """Let a LoRA adapter go: new requests are refused, and its place is free when the last request
    that uses it has ended."""

    needs_all = True

    name: str


class FlushCacheCall(SchedulerCall[int], frozen=True):
    """Empty the radix tree of all KV that no running request uses; the reply is the number of pages
    freed."""

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        return sum(values.values())


class ReleaseCacheCall(SchedulerCall[int], frozen=True, kw_only=True):
    """End a lease, or a session, whose KV is then evicted first; the reply is the number of tokens
    of either.

    An unknown lease, or another tenant's, is an error with status 404.
    """

    tenant: Tenant = NO_TENANT
    lease: str = ""
    session: str = ""
    root: CacheRoot = BASE_ROOT
    """The tenant and the salt of the session's requests."""

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        return sum(values.values())


class CacheTreeCall(SchedulerCall[dict[str, Any]], frozen=True, kw_only=True):
    """A view of the radix tree. The reply is a :class:`radixrt.messages.cache_tree.CacheTree` as
    builtins, to which the tokenizer process adds the texts of its tokens."""

    depth: int = 3
    """Levels of nodes shown below each root; deeper nodes are only counted."""
    children: int = 16
    """Most children shown of a node, those with the most pages below them; the others are only
    counted."""
    namespace: str | None = None
    """The tenant's cache namespace whose part of the tree is shown; None: all."""
    with_texts: bool = True
    """Show the texts of prompts, unless the server hides them from everybody."""
    most: int = 2000
    """Most nodes shown: those with the most pages in and below them."""
    below: int | None = None
    """The node whose part of the tree is shown, by the id of an earlier view; if it has left the
    tree, the whole is shown."""

    def receiver(self, replicas: Replicas) -> tuple[int, Self] | None:
        if self.below is None:
            return None
        below, replica = divmod(self.below, replicas.num_replicas)
        return replica, replace(self, below=below)

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        return merged_trees(values, num_replicas)


class CacheNodeCall(SchedulerCall[CacheNode], frozen=True):
    """One node of an earlier view, with the tokens of its whole prefix. It is an error if it has
    left the tree."""

    node: int

    def receiver(self, replicas: Replicas) -> tuple[int, Self]:
        node, replica = divmod(self.node, replicas.num_replicas)
        return replica, replace(self, node=node)


class StatsCall(SchedulerCall[SchedulerStats], frozen=True):
    """Counters of the engine, each of the sum over the replicas and of each of them."""

    needs_all = True

    check_invariants: bool = False
    """Also check that every page is accounted for; a violation is the reply's error."""

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        by_replica = {str(replica): values[replica] for replica in sorted(values)}
        own = {"expert_imbalance": {}, "replicas": by_replica}
        return added(list(values.values())) | own


class TenantStatsCall(SchedulerCall[TenantStats], frozen=True):
    """The counters of one tenant."""

    tenant: Tenant

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        return merged_tenant_stats(list(values.values()))


class DrainReplicaCall(SchedulerCall[bool], frozen=True):
    """Let a replica go: its requests go on in others, and its processes end. The reply is true.

    It is an error if there is no such replica, it does not run, or no other one does.
    """

    replica: int

    def receiver(self, replicas: Replicas) -> tuple[int, Self]:
        return self.replica, self


class CacheFactsCall(SchedulerCall[CacheFacts], frozen=True):
    """The facts from which the cache misses of a sequence are explained."""

    seq_id: int


class MatchCall(SchedulerCall[list[CacheMatch]], frozen=True, kw_only=True):
    """The number of tokens that the cache holds of each prompt now. Nothing is computed or kept.

    The tokenizer process hands it on with the prompts in tokens.
    """

    prompts: list[Prompt]
    root: CacheRoot
    tenant: Tenant = NO_TENANT

    @property
    def token_ids(self) -> list[PackedIds]:
        return [prompt.token_ids for prompt in self.prompts if isinstance(prompt, TokenPrompt)]

    @staticmethod
    def merge(values: dict[int, Any], num_replicas: int) -> Any:
        of_prompts = zip(*values.values(), strict=True)
        return [max(found, key=itemgetter("cached_tokens")) for found in of_prompts]


class PinCall(SchedulerCall[LeaseGranted], frozen=True, kw_only=True):
    """Keep the KV that the tree holds of a prompt from eviction for ``ttl_s`` seconds: a lease. It
    is an error if too much is pinned already, or ``ttl_s`` is too long.

    The tokenizer process hands it on with the prompt in tokens.
    """

    prompt: Prompt
    root: CacheRoot
    ttl_s: float
    lease: str = ""
    """The id of the lease, which a dead engine had granted; empty: a new one."""
    tenant: Tenant = NO_TENANT

    @property
    def token_ids(self) -> PackedIds:
        assert isinstance(self.prompt, TokenPrompt)
        return self.prompt.token_ids

    def receiver(self, replicas: Replicas) -> tuple[int, Self]:
        return replicas.owner(self.token_ids, self.root), self


def kinds_of(base: type[Call[Any]]) -> list[type[Call[Any]]]:
    """All calls that are declared below a base.

    >>> StatsCall in kinds_of(SchedulerCall), TokenizeCall in kinds_of(SchedulerCall)
    (True, False)
    """
    return [kind for below in base.__subclasses__() for kind in kinds_of(below)] or [base]


if TYPE_CHECKING:
    AnyCall: TypeAlias = Call[Any]
    AnySchedulerCall: TypeAlias = SchedulerCall[Any]
else:  # msgspec decodes unions of classes
    AnyCall = reduce(or_, kinds_of(Call))
    AnySchedulerCall = reduce(or_, kinds_of(SchedulerCall))
