"""Ollama's API, translated to and from the requests of :mod:`radixrt.api.openai`."""
