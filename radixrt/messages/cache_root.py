"""The root of a part of the KV cache: the requests with equal roots share prefixes, others never do.

A root is a tuple and never one string, so that no value of one field can be taken for another: a
client's salt that reads like an adapter's digest is a salt.
"""

from typing import NamedTuple


class CacheRoot(NamedTuple):
    """What a request's KV depends on beside its tokens, and who may read it.

    >>> CacheRoot(salt="a") == CacheRoot(adapter="a")
    False
    """

    tenant: str = ""
    """The cache namespace of the API key; empty without declared keys."""
    salt: str = ""
    """The ``cache_salt`` of the client."""
    adapter: str = ""
    """Digest of the LoRA adapter that the model computes with; empty: the base model."""

    def packed(self) -> bytes:
        """The fields, each behind its length: no two roots have the same bytes."""
        parts = [part.encode("utf-8", "surrogatepass") for part in self]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


BASE_ROOT = CacheRoot()
"""The root of the base model's requests without a tenant or a salt."""
