"""JSON schemas: their normal form (``normal``), what a grammar enforces of it, and the checks of
the rest."""
