"""Measures how requests fare beside more work than the server can do at once: ``python -m
bench.overload``."""
