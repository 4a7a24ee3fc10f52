"""Eviction policies: the order in which unlocked leaves of the radix tree are evicted."""
