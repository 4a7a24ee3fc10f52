"""Compiles constraints to grammars, in helper processes with limits of time and memory."""
