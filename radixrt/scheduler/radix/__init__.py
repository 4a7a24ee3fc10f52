"""The KV cache: radix tree, pages, eviction, leases, hints."""
