"""Draft tokens, which one step verifies: their sources, their number, and their acceptance."""
