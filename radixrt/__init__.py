"""radixrt: an LLM serving engine whose KV cache is a radix tree over token ids."""

__version__ = "0.1.0"
