"""Endpoints that give numbers in place of text: embeddings, reranking, scores and classes."""
