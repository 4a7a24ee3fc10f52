"""JSON schemas: brought into few plain forms (normalize), then audited against what backends were measured to do (audit)."""
