"""Tells routers outside which blocks of KV this engine holds: docs/kv_events.md."""
