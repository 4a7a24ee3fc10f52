"""Hashes of KV blocks, which identify a prefix outside its engine.

A block is a page of the radix tree. Its hash is BLAKE2b with 8 bytes of digest over the hash of the block before it and
its own token ids, packed (little-endian int32). The first block of a prompt follows the hash of its cache salt in UTF-8.
So a hash identifies a whole prefix under one salt, and is the same in every process and on every machine.
"""

from hashlib import blake2b

from radixrt.messages.ids import PackedIds

HASH_BYTES = 8


def namespace_hash(salt: str = "") -> bytes:
    """The hash before the first block of a prompt with this cache salt: [HASH_BYTES]."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES).digest()


def block_hashes(before: bytes, packed: PackedIds, page_size: int) -> bytes:
    """Hashes of consecutive blocks: [len(packed) // (4 * page_size) * HASH_BYTES].

    Args:
        before: hash of the block they follow, or :func:`namespace_hash`.
        packed: their packed token ids; an incomplete page at the end is ignored.
    """
    page_bytes, hashes = 4 * page_size, []
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        before = blake2b(
            before + packed[start : start + page_bytes], digest_size=HASH_BYTES
        ).digest()
        hashes.append(before)
    return b"".join(hashes)
