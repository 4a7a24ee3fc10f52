"""Checked values: found in the growing answer, validated, and generated again if they are
invalid."""
