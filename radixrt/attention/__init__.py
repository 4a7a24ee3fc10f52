"""Attention over a paged KV cache: the metadata of a step, and backends that compute it."""
