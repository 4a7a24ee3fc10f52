"""A view of the radix tree: the value of the reply to a CacheTreeCall."""

import msgspec

from radixrt.messages.ids import PackedIds
from radixrt.messages.requests import RetentionLevel


class CacheTreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the radix tree and all that hangs below it."""

    text: str | None = None
    """Of the first tokens; the tokenizer process puts it in their place. None: not shown."""
    first_token_ids: PackedIds = b""
    """Up to 32 of the edge's tokens."""
    num_tokens: int
    """Of the edge."""
    total_tokens: int
    """Of the edge and everything below it."""
    total_nodes: int
    locked: bool
    """Used by a running sequence or pinned."""
    pinned: bool
    idle_s: float
    """Since its last use."""
    retention: RetentionLevel = "default"
    children: list["CacheTreeNode"] = []
    """Those with the most tokens below them first; fewer than there are, where the view ends."""


class CacheNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the tree that requests with one cache salt share."""

    namespace: str = ""
    """Of the API keys that share it: ``key:NAME`` or ``group:NAME``."""
    salted: bool
    """Whether the requests brought a salt. The salt itself is a secret and not shown."""
    total_tokens: int
    total_nodes: int
    children: list[CacheTreeNode]


class CacheTree(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the reply to a CacheTreeCall."""

    page_size: int
    total_tokens: int
    total_nodes: int
    namespaces: list[CacheNamespace]
    """Those with the most tokens first."""
