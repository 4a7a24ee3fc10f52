"""Endpoints that warm, pin, release and show the KV cache."""
