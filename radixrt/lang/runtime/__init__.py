"""Executes programs: background calls, their results, and the admission of batches."""
