"""Towers: models that turn images into embeddings of the language model."""
