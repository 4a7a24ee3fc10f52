"""Checked values: found in the growing answer, validated, and retried if they are invalid."""
