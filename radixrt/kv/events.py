"""What does an engine tell routers about its KV cache? The messages of the KV-event stream (docs/kv_events.md).

The terms are vLLM's (``BlockStored``, ``BlockRemoved``, ``AllBlocksCleared``), so a router that knows one stream knows
the other's meaning. All are msgpack maps; an event's name is its field ``type``. Block hashes
(:mod:`radixrt.kv.block_hash`) travel packed, 8 bytes each.
"""

import msgspec

from radixrt.messages.ids import PackedIds

VERSION = 1
"""Grows when a subscriber written for the version before would misunderstand; a new field alone is no reason."""

PackedHashes = bytes


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events; the class name is the tag."""


class BlockStored(Event, frozen=True, kw_only=True):
    """Consecutive blocks are in the cache from now on."""

    block_hashes: PackedHashes
    parent_hash: bytes | None
    """Hash of the block that they follow; None: they begin a prompt."""
    token_ids: PackedIds | None
    """What they hold, packed int32; None unless the server was started with ``--kv-events-tokens``."""
    page_size: int
    """Tokens in a block."""
    salted: bool
    """Only requests with the same cache salt, which is not told, can use them."""


class BlockRemoved(Event, frozen=True, kw_only=True):
    """Blocks are not in the cache any more."""

    block_hashes: PackedHashes
    """In no order to rely on."""


class AllBlocksCleared(Event, frozen=True, kw_only=True):
    """Nothing is in the cache any more."""


class AllBlocks(Event, frozen=True, kw_only=True):
    """A snapshot, in answer to a replay request that reaches too far back: the cache holds these blocks and no others."""

    block_hashes: PackedHashes
    """In no order to rely on."""
    page_size: int


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one step has changed."""

    version: int = VERSION
    stream: str
    """Names this start of the engine. With another name, sequence numbers begin anew and the cache is empty."""
    sequence: int
    """1, 2, 3 …; a snapshot has the number of the last batch that is part of it."""
    timestamp: float
    """When it was published, in Unix seconds."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | AllBlocks]
    """In the order in which they happened."""


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subscriber has missed batches. The answer is a list of batches, after which it has missed none."""

    stream: str
    """The stream that it knows; anything else, such as "", asks for a snapshot."""
    sequence: int
    """The first batch that it lacks."""
