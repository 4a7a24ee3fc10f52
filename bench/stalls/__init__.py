"""Measures how much one hostile request delays the stream of another client: ``python -m bench.stalls``."""
