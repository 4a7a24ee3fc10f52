"""JSON schemas: their normal form (``normal``), what a grammar enforces, and checks of the rest."""
