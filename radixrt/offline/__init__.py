"""``LLM``: the engine inside a Python program."""
