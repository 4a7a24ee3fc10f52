"""Which eviction policies are there? Apart from their code, so that the command line needs none of it."""

from typing import Literal

EvictionPolicyName = Literal["lru", "fifo", "priority", "duel"]
