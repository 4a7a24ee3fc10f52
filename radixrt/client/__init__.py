"""Asynchronous client of a running engine, used by the api process and by ``LLM``."""
