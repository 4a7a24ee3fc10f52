"""Serves GGUF files: their metadata become a checkpoint folder, their tensors are read from the
file."""
