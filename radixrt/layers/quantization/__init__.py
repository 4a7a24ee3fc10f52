"""Weights of 4 or 8 bits: the formats of checkpoints, and rounding of plain ones."""
