"""Sequences that wait: their order, admission, retraction."""
