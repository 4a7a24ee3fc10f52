"""Starts the engine's processes and ends them together."""
