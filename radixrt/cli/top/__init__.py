"""``radixrt top``: a live view of a server's KV cache in a terminal."""
