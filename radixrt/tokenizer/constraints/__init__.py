"""Constrained answers in the tokenizer process."""
