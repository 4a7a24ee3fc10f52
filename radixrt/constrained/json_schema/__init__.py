"""JSON schemas: rewritten into a normal form (``normal``), then audited against the measured backends (``auditing``)."""
