"""``radixrt lint-prompts``: the cache misses of recorded requests, their causes, and what they
cost."""
