"""Types with which the processes speak about the KV cache: hints, statistics, events, block
hashes."""
