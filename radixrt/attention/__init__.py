"""Attention over a paged KV cache: one ragged description of a step, several backends."""
