"""Weights of 4 or 8 bits: how checkpoints keep them, and how they are made from a plain checkpoint."""
