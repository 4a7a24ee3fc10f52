"""Keeps KV pages on disk: the directory, its owner, and the journal of the pages in it."""
