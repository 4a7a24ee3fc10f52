"""Compares programs in the language with the same programs that use the openai client."""
