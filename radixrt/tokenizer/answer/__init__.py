"""Turns token ids into an answer's text, reasoning and tool calls."""
