"""Explains cache misses: which message, which text, and why."""
