"""Kept conversations: prompts that a client sends once."""
