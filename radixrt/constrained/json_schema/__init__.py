"""JSON schemas: made simple (normalize), audited against what backends were measured to do (audit)."""
