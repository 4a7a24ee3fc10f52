"""Chooses the replica for each request, by what the replicas have cached and by their load
(docs/internals/routing.md)."""
