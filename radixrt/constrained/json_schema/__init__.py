"""JSON schemas: rewritten into few plain forms (normal), then audited against what backends were measured to do (auditing)."""
