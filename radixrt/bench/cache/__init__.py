"""``radixrt bench cache``: compares eviction policies, queue orders and pool sizes on recorded
traffic."""
