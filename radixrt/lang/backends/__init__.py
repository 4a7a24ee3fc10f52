"""Backends, which answer the calls of programs."""
