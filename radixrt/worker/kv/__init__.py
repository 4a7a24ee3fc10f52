"""The KV pool and the tables that address it."""
