"""Measurements: ``radixrt bench``."""
