"""The worker process: weights, KV pool, forward pass and sampling."""
