"""Benchmarks of KV that outlives memory, worker and server."""
