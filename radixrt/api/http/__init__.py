"""HTTP mechanics that all endpoints share: bodies, errors, events, middleware."""
