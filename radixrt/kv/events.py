"""Messages of the KV-event stream, which tells routers the cached blocks of an engine
(docs/kv_events.md).

The terms are vLLM's (``BlockStored``, ``BlockRemoved``, ``AllBlocksCleared``), with the same
meaning. All are msgpack maps; an event's name is its field ``type``. Block hashes
(:mod:`radixrt.kv.block_hash`) are packed, 8 bytes each.
"""

import msgspec

from radixrt.messages.ids import PackedIds

VERSION = 1
"""Increased when a subscriber for the version before would misunderstand the stream; not for a new
field."""

PackedHashes = bytes


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events; the class name is the tag."""


class BlockStored(Event, frozen=True, kw_only=True):
    """Consecutive blocks are in the cache from now on."""

    block_hashes: PackedHashes
    parent_hash: bytes | None
    """Hash of the block before them; None: they are the first of a prompt."""
    token_ids: PackedIds | None
    """Their token ids, packed int32; None unless the server was started with
    ``--kv-events-tokens``."""
    page_size: int
    """Tokens in a block."""
    salted: bool
    """Whether only requests with the same cache salt, which is not published, can use them."""


class BlockRemoved(Event, frozen=True, kw_only=True):
    """Blocks are not in the cache any more."""

    block_hashes: PackedHashes
    """Hashes of the blocks, in arbitrary order."""


class AllBlocksCleared(Event, frozen=True, kw_only=True):
    """The cache is empty."""


class AllBlocks(Event, frozen=True, kw_only=True):
    """A snapshot, in answer to a replay request that reaches too far back: the cache holds these
    blocks and no others."""

    block_hashes: PackedHashes
    """Hashes of the blocks, in arbitrary order."""
    page_size: int


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of one step."""

    version: int = VERSION
    stream: str
    """Name of this start of the engine. Under another name, sequence numbers begin at 1 and the
    cache is empty."""
    sequence: int
    """1, 2, 3 …; a snapshot has the number of the last batch that it contains."""
    timestamp: float
    """Time of publication, in Unix seconds."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | AllBlocks]
    """Events in order of time."""


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subscriber has missed batches. The answer is the list of those batches, or a snapshot."""

    stream: str
    """The name of its stream; any other value, such as "", requests a snapshot."""
    sequence: int
    """Number of the first batch that it lacks."""
