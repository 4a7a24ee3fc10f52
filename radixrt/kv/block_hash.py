"""What is a block of KV called outside of its engine? A hash that anybody can compute who knows the tokens before it.

A block is a page of the radix tree. Its hash is BLAKE2b with 8 bytes of digest over the hash of the block before it and
its own token ids, packed (little-endian int32); the first block of a prompt follows the hash of its cache salt in
UTF-8. So a hash stands for a whole prefix in one namespace, and is the same in every process and on every machine.
"""

from hashlib import blake2b

from radixrt.messages.ids import PackedIds

HASH_BYTES = 8


def namespace_hash(salt: str = "") -> bytes:
    """What the first block of a prompt with this cache salt follows: [HASH_BYTES]."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES).digest()


def block_hashes(before: bytes, packed: PackedIds, page_size: int) -> bytes:
    """Hashes of consecutive blocks: [len(packed) // (4 * page_size) * HASH_BYTES].

    Args:
        before: hash of the block they follow, or :func:`namespace_hash`.
        packed: their token ids, whole pages; what is left over counts for nothing.
    """
    page_bytes, hashes = 4 * page_size, []
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        before = blake2b(
            before + packed[start : start + page_bytes], digest_size=HASH_BYTES
        ).digest()
        hashes.append(before)
    return b"".join(hashes)
