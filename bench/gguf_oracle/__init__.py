"""llama.cpp and transformers as oracles for GGUF files: tokens, greedy answers, next-token
distributions, files of its own tools."""
