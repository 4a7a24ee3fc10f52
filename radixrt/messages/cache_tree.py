"""A view of the radix tree: the value of the reply to a CacheTreeCall."""

import msgspec

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import PackedIds
from radixrt.messages.requests import RetentionLevel


class CacheTreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the radix tree and all that hangs below it."""

    node: int
    """The node's id: that of the last page of its edge."""
    text: str | None = None
    """The text of the first tokens; the tokenizer process puts it in their place. None: not
    shown."""
    first_token_ids: PackedIds = b""
    """Up to 32 of the edge's tokens."""
    num_tokens: int
    """Tokens of the edge."""
    total_tokens: int
    """Tokens of the edge and everything below it."""
    total_nodes: int
    num_children: int = 0
    """Edges that begin where this one ends."""
    uses: int = 0
    """Times that a request or lease has used it or what is below it."""
    running: int = 0
    """Running sequences that use it."""
    waiting: int = 0
    """Waiting sequences whose cached prefix reaches into it."""
    leases: int = 0
    """That hold it."""
    states: int = 0
    """States of recurrent layers that are kept on the edge."""
    locked: bool
    """Used by a running sequence or pinned."""
    pinned: bool
    idle_s: float
    """Since its last use, or that of what is below it; 0 while it is used."""
    retention: RetentionLevel = "default"
    children: list["CacheTreeNode"] = []
    """Children, those with the most tokens below them first; fewer than there are, where the view
    ends."""


class CacheNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the tree that requests with one cache root share."""

    namespace: str = ""
    """The namespace of the API keys that share it: ``key:NAME`` or ``group:NAME``."""
    salted: bool
    """Whether the requests brought a salt. The salt itself is a secret and not shown."""
    adapter: str = ""
    """Digest of the adapter that has computed it; empty: the base model."""
    replica: int = 0
    """Number of the replica whose tree it is in."""
    total_tokens: int
    total_nodes: int
    num_children: int = 0
    children: list[CacheTreeNode]


class CacheTree(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the reply to a CacheTreeCall."""

    page_size: int
    total_tokens: int
    total_nodes: int
    namespaces: list[CacheNamespace]
    """Namespaces, those with the most tokens first."""
    above: list[CacheTreeNode] = []
    """The nodes on the way from the root to the node of the view, without children."""


class CacheLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, as the api process sees it."""

    lease: str
    tenant: str
    """Name of the key that holds it."""
    expires_in_s: float


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node with its whole prefix: the value of the reply to a CacheNodeCall. It holds secrets,
    which the api keeps."""

    root: CacheRoot
    token_ids: PackedIds
    """Tokens from the root to the end of its edge."""
    num_tokens: int
    """Tokens of its edge."""
    text: str | None = None
    """The text of the beginning of its edge, as far as it is shown; the tokenizer process adds the
    texts. None: not shown."""
    text_before: str | None = None
    """The text of the last tokens before its edge."""
    age_s: float
    """Since its pages were computed."""
    idle_s: float
    uses: int
    running: int
    leases: list[CacheLease]
    """That hold it."""
